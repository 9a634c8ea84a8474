import pytest

from octavo.engine.chat import ChatTemplate
from octavo.engine.conversation import ChatOptions
from octavo.engine.template_sandbox import read_chat_template
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, InvalidRequestError
from tests.byte_level import build_byte_level_tokenizer
from tests.checkpoints import BOS_ID, build_tokenizer

TOKENIZER = Tokenizer(build_tokenizer())
LOOPS = (
    "{% for m in messages %}{{ m.role }}:"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
)
TAKES_BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
PRINTS = "{% for m in messages %}{{ m.content }}{% endfor %}"
REFUSES = "{{ raise_exception('system role is unsupported') }}"
HELLO = [{"role": "user", "content": "hi"}]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def render(messages, *, template=None, **options):
    return ChatTemplate(TOKENIZER, template).render(messages, ChatOptions(**options))


def test_prompt_has_exactly_one_bos():
    prompt = ChatTemplate(TOKENIZER).encode(HELLO)
    assert prompt.token_ids.tolist()[:2] == [BOS_ID, 259]
    assert len(prompt.token_ids) == 22
    assert prompt.text == "<s>[user]hi\n[assistant]"


def test_generation_prompt_can_be_left_out():
    assert render(HELLO, add_generation_prompt=False) == "<s>[user]hi\n"


def test_final_message_is_continued():
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    text = render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<s>[user]hi\n[assistant]I am"


def test_continuing_excludes_a_generation_prompt():
    with pytest.raises(InvalidRequestError, match="excludes add_generation_prompt"):
        render(HELLO, continue_final_message=True)


@pytest.mark.parametrize("template", [None, PRINTS], ids=["concatenates", "prints"])
def test_template_without_a_loop_over_parts_gets_strings(template):
    as_string = render([{"role": "user", "content": "one\ntwo"}], template=template)
    as_parts = render([{"role": "user", "content": parts("one", "two")}], template=template)
    assert as_parts == as_string
    assert "one\ntwo" in as_parts


def test_template_that_loops_over_parts_gets_lists():
    assert render([{"role": "user", "content": parts("a", "b")}], template=LOOPS) == "user:<a><b>"
    assert render([{"role": "user", "content": "a"}], template=LOOPS) == "user:<a>"


def test_template_that_takes_both_gets_what_the_client_sent():
    assert render([{"role": "user", "content": parts("a")}], template=TAKES_BOTH) == "<a>"
    assert render([{"role": "user", "content": "a"}], template=TAKES_BOTH) == "a"


def test_content_format_can_be_forced():
    messages = [{"role": "user", "content": parts("a")}]
    assert render(messages, template=TAKES_BOTH, content_format="string") == "a"
    assert render([*HELLO], template=TAKES_BOTH, content_format="openai") == "<hi>"


def test_model_without_a_template_refuses_chats_and_says_what_to_do():
    plain = Tokenizer(build_tokenizer(chat_template=None))
    with pytest.raises(InvalidRequestError, match=r"no chat template.* --chat-template"):
        ChatTemplate(plain).render(HELLO)
    assert ChatTemplate(plain, PRINTS).render(HELLO) == "hi"


def test_text_of_the_templates_own_error_reaches_the_caller():
    with pytest.raises(InvalidRequestError, match="system role is unsupported"):
        render(HELLO, template=REFUSES)


@pytest.mark.parametrize(
    "template",
    ["{{ messages.nothing.at.all }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}", "{% if %}"],
)
def test_template_that_fails_is_the_requests_error(template):
    with pytest.raises(InvalidRequestError, match="the chat template fails"):
        render(HELLO, template=template)


def test_several_named_templates_need_a_default():
    tokenizer = Tokenizer(build_tokenizer())
    tokenizer.hf_tokenizer.chat_template = {"a": PRINTS, "b": PRINTS}
    with pytest.raises(InvalidRequestError, match="multiple chat templates"):
        ChatTemplate(tokenizer).render(HELLO)
    assert ChatTemplate(tokenizer).render(HELLO, ChatOptions(chat_template="a")) == "hi"


def test_variables_reach_the_template_and_cannot_replace_its_arguments():
    template = "{{ enable_thinking }}"
    assert render(HELLO, template=template, template_arguments={"enable_thinking": 3}) == "3"
    for name in ("chat_template", "tokenize", "messages"):
        with pytest.raises(InvalidRequestError, match=name):
            render(HELLO, template_arguments={name: "x"})


def test_tools_reach_the_template():
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert render(HELLO, template="{{ tools[0].function.name }}", tools=tools) == "weather"


def test_arguments_of_a_tool_call_are_parsed():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Prague"}'}}
    template = "{{ messages[0].tool_calls[0].function.arguments.city }}"
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(messages, template=template) == "Prague"
    call["function"]["arguments"] = "{"
    with pytest.raises(InvalidRequestError, match="not JSON"):
        render(messages, template=template)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        (["hi"], "must have a role"),
        ([{"content": "hi"}], "must have a role"),
        ([{"role": "user", "content": 5}], "type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'; only text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a string as text"),
        ([{"role": "user", "content": [5]}], "type 5"),
        ([{"role": "assistant", "tool_calls": [5]}], "must have a function"),
    ],
)
def test_malformed_messages_are_refused(messages, text):
    with pytest.raises(InvalidRequestError, match=text) as caught:
        render(messages)
    assert caught.value.parameter == "messages"


def test_half_a_character_in_a_chat_is_refused():
    with pytest.raises(InvalidRequestError, match=r"position 9, .* no character") as caught:
        ChatTemplate(TOKENIZER).encode([{"role": "user", "content": "\ud83d"}])
    assert caught.value.parameter == "messages"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chat_template", {"chat_template": 5}),
        ("chat_template_content_format", {"content_format": "html"}),
        ("tools", {"tools": "x"}),
        ("tools", {"tools": [5]}),
        ("chat_template_kwargs", {"template_arguments": "x"}),
        ("chat_template_kwargs", {"template_arguments": {5: 1}}),
    ],
)
def test_options_of_other_types_are_refused_by_name(name, options):
    with pytest.raises(InvalidRequestError, match=f"^{name} ") as caught:
        render(HELLO, **options)
    assert caught.value.parameter == name


def test_chat_that_renders_to_nothing_is_refused():
    tokenizer = Tokenizer(build_byte_level_tokenizer())
    with pytest.raises(InvalidRequestError, match="to nothing"):
        ChatTemplate(tokenizer, "{{ messages[0].content }}").encode([{"role": "u", "content": ""}])


def test_template_is_a_file_or_a_text(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(PRINTS)
    assert read_chat_template(str(path)) == read_chat_template(PRINTS) == PRINTS
    assert read_chat_template(None) is None
    with pytest.raises(ConfigError, match="missing"):
        read_chat_template(str(tmp_path / "missing.jinja"))
    with pytest.raises(ConfigError, match="error in line 2"):
        read_chat_template("{% for m in messages %}\n{% endif %}")
