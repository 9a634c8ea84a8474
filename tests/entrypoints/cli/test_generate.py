import io

import pytest

from octavo.entrypoints.cli.generate import AnswerPrinter
from octavo.entrypoints.cli.main import main
from octavo.outputs import CompletionOutput


def piece(text="", *, reason=None, error=None):
    return CompletionOutput(0, text, [], finish_reason=reason, error=error)


def test_single_answer_is_printed_as_it_grows():
    stream = io.StringIO()
    printer = AnswerPrinter(1, stream)
    printer.add(0, piece("a"))
    assert stream.getvalue() == "a"
    printer.add(0, piece("b", reason="length"))
    assert stream.getvalue() == "ab\n"


def test_several_answers_are_printed_in_order_under_their_numbers():
    stream = io.StringIO()
    printer = AnswerPrinter(3, stream)
    printer.add(1, piece("x", reason="stop"))
    printer.add(2, piece("y"))
    printer.add(0, piece("a"))
    assert stream.getvalue() == "[1]a"
    printer.add(0, piece("b", reason="stop"))
    assert stream.getvalue() == "[1]ab\n[2]x\n[3]y"
    printer.add(2, piece(reason="stop"))
    assert stream.getvalue() == "[1]ab\n[2]x\n[3]y\n"


def test_failed_answer_says_why():
    stream = io.StringIO()
    printer = AnswerPrinter(1, stream)
    printer.add(0, piece("a", reason="error", error="non-finite logits"))
    assert stream.getvalue() == "a\n[error: non-finite logits]\n"
    assert printer.has_failed


def run(capsys, *arguments):
    status = main(["generate", *map(str, arguments)])
    return (status, *capsys.readouterr())


def test_text_of_a_model_goes_to_stdout_and_its_speed_to_stderr(chain_letters, capsys):
    status, out, err = run(capsys, "z", "--model", chain_letters, "--temperature", 0)
    assert (status, out) == (0, "abcdefghij\n")
    assert err.startswith("11 tokens in ")


def test_options_reach_the_engine_and_the_sampler(chain_letters, capsys):
    options = ("--model", chain_letters, "--temperature", 0, "--max-tokens", 4, "--block-size", 8)
    status, out, _ = run(capsys, "z", "za", *options, "--stop", "d")
    assert (status, out) == (0, "[1]abc\n[2]bc\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--model", "/nowhere"], "there is no file or folder /nowhere"),
        (["--block-size", "0"], "block_size is 0"),
    ],
)
def test_mistake_is_one_sentence_and_status_2(capsys, arguments, text):
    status, out, err = run(capsys, "z", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"octavo: {text}")
    assert err.count("\n") == 1


def test_refused_prompt_is_status_2(chain_letters, capsys):
    status, _, err = run(capsys, "z" * 70, "--model", chain_letters, "--max-model-len", 64)
    assert status == 2
    assert "72 tokens" in err
