"""``octavo chat`` and ``octavo complete`` against a real server that repeats prompts."""

import builtins

import pytest

from octavo.entrypoints.cli.chat import Conversation
from octavo.entrypoints.cli.http_client import HttpClient, ServerError
from octavo.entrypoints.cli.main import main


@pytest.fixture
def type_lines(monkeypatch):
    """Return a function that gives lines to ``input``, then ends it."""

    def type_lines(*lines):
        remaining = iter(lines)

        def read(prompt):
            line = next(remaining, None)
            if line is None:
                raise EOFError
            return line

        monkeypatch.setattr(builtins, "input", read)

    return type_lines


def test_quick_question_is_answered_and_nothing_else(server, capsys):
    arguments = ["chat", "--url", f"{server.url}/v1", "-q", "hi", "--max-tokens", "9"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == " [user]h\n"


def test_conversation_goes_on_line_by_line(server, capsys, type_lines):
    type_lines("hi", "", "ho")
    arguments = ["chat", "--url", f"{server.url}/v1", "--system-prompt", "x", "--max-tokens", "12"]
    assert main(arguments) == 0
    answer = " [system]x\n\n"
    assert capsys.readouterr().out == f"Chatting with tiny; Ctrl-D ends.\n{answer}{answer}\n"


def test_earlier_turns_are_sent_again(server):
    fields = {"model": "tiny", "max_tokens": 4}
    conversation = Conversation(HttpClient(f"{server.url}/v1"), fields, "x")
    answers = ["".join(conversation.say(text)) for text in ("one", "two")]
    contents = [message["content"] for message in conversation.messages]
    assert contents == ["x", "one", answers[0], "two", answers[1]]


def test_refused_turn_is_forgotten_and_a_broken_one_kept(server):
    conversation = Conversation(HttpClient(f"{server.url}/v1"), {"max_tokens": 0}, None)
    with pytest.raises(ServerError):
        list(conversation.say("one"))
    assert conversation.messages == []

    conversation = Conversation(HttpClient(f"{server.url}/v1"), {"max_tokens": 500}, None)
    pieces = conversation.say("one")
    while not (first := next(pieces)):
        pass
    pieces.close()
    assert conversation.messages[1]["content"].startswith(first)


def test_completions_go_on_line_by_line(server, capsys, type_lines):
    type_lines("ab", "ab")
    assert main(["complete", "--url", f"{server.url}/v1", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == "Completing with tiny; Ctrl-D ends.\n ab\n ab\n\n"
    assert main(["complete", "--url", f"{server.url}/v1", "-q", "ab", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == " ab\n"


def test_error_of_one_line_does_not_end_the_session(server, capsys, type_lines):
    type_lines("ab", "ab")
    arguments = ["complete", "--url", f"{server.url}/v1", "--temperature", "-1"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("[temperature is -1.0; it must be in [0, 1e+06]]") == 2


def test_absent_server_is_one_sentence_and_status_one(capsys):
    assert main(["chat", "--url", "http://127.0.0.1:1/v1", "-q", "hi"]) == 1
    assert capsys.readouterr().err.startswith("octavo: no server answers at http://127.0.0.1:1")
