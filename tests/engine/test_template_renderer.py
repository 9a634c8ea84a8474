"""Our own sandbox against the renderer of Hugging Face's tokenizers, and what it keeps out."""

import pytest

from octavo.engine.chat import ChatTemplate
from octavo.engine.conversation import ChatOptions
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from tests.checkpoints import build_tokenizer

TEMPLATES = {
    "blocks": """
{%- if messages[0].role == 'system' %}
    {{- bos_token + messages[0].content.strip() }}
{%- endif %}
{% for message in messages %}
    {%- if loop.index0 > 9 %}{% break %}{% endif %}
<|{{ message['role'] }}|>
{{ message.content }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
""",
    "variables": """
{%- set ns = namespace(last=-1, self=1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{{ m.content | trim }}{% endfor %}{{ ns.last }}{{ dict(a=1) | tojson }}{{ flavour }}""",
    "training": """
{%- for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{% set x = 5 %}{% endgeneration %}{{ x is defined }}
{% else %}{{ m.content }}{% endif %}{% endfor %}""",
    "json": """{{ tools | tojson(indent=2) }}{{ documents | tojson }}
{%- for m in messages %}{{ m | tojson(sort_keys=true) }}{% endfor %}{{ 'é<&>' | tojson }}""",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{{ messages[-1].content }}",
}
CONVERSATION = [
    {"role": "system", "content": " be brief  "},
    {"role": "user", "content": "hi\n", "name": None},
    {"role": "assistant", "content": "I am ", "reasoning_content": "hm"},
]
TOKENIZER = Tokenizer(build_tokenizer())


def render(template, messages=CONVERSATION, **options):
    return ChatTemplate(TOKENIZER, template).render(messages, ChatOptions(**options))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("mode", ["prompted", "closed", "continued"])
def test_text_is_what_transformers_renders(name, mode):
    template, is_prompted = TEMPLATES[name], mode == "prompted"
    is_continued = mode == "continued" and name != "json"  # a mark would be inside of the JSON
    tools = [{"type": "function", "function": {"name": "f", "description": "ä"}}]
    documents = [{"title": "a", "text": "b"}] if name == "json" else None
    messages = CONVERSATION[:-1] if name == "json" else CONVERSATION  # ours has more names
    expected = TOKENIZER.hf_tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        tools=tools,
        documents=documents,
        add_generation_prompt=is_prompted,
        continue_final_message=is_continued,
        tokenize=False,
        flavour="sweet",
    )
    text = render(
        template,
        messages,
        content_format="string",
        tools=tools,
        documents=documents,
        add_generation_prompt=is_prompted,
        continue_final_message=is_continued,
        template_arguments={"flavour": "sweet"},
    )
    assert text == expected


def test_the_models_own_template_is_rendered_as_by_transformers():
    messages = CONVERSATION[1:]
    expected = TOKENIZER.hf_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert ChatTemplate(TOKENIZER).render(messages) == expected


def test_function_is_described_to_the_template():
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: where
        """

    text = render("{{ tools[0].function.name }} {{ messages[0].content }}", tools=[weather])
    assert text.startswith("weather")
    with pytest.raises(InvalidRequestError, match="cannot be described") as caught:
        render("{{ tools }}", tools=[lambda city: city])
    assert caught.value.parameter == "tools"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ dict.__globals__ }}",
        "{{ raise_exception.__code__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns['__class__'] = 1 %}",
        "{{ lipsum() }}",
        "{% include 'setup.py' %}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_nothing_but_the_conversation_can_be_reached(template):
    with pytest.raises(InvalidRequestError) as caught:
        render(template)
    assert caught.value.reason_code == "chat_template_failed"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("documents", {"documents": [{"text": "x"}]}),
        (
            "reasoning_effort",
            {
                "template_arguments": {"reasoning_effort": "low"},
                "needed_arguments": ("reasoning_effort",),
            },
        ),
    ],
)
def test_what_the_template_does_not_read_is_refused(name, options):
    shown = f"{{{{ {name} }}}}{{{{ messages[0].content }}}}"
    assert render(shown, **options)
    with pytest.raises(InvalidRequestError, match=f"does not read {name}") as caught:
        render("{{ messages[0].content }}", **options)
    assert caught.value.parameter == name


def test_continuing_needs_a_text_that_the_template_shows():
    closed = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(InvalidRequestError, match="does not show the final message"):
        render("{{ messages[0].content }}", **closed)
    with pytest.raises(InvalidRequestError, match="final message with a text"):
        render(TEMPLATES["date"], [{"role": "assistant", "content": None}], **closed)
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
    loops = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    assert render(loops, parts, **closed) == "<so"


def test_objects_do_not_reach_the_template():
    with pytest.raises(InvalidRequestError, match="plain data"):
        render("{{ messages[0].file }}", [{"role": "user", "content": "a", "file": object()}])
