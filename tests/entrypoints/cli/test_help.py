import pytest

from octavo.entrypoints.cli import serve
from octavo.entrypoints.cli.options import ENGINE_GROUPS
from octavo.entrypoints.cli.parser import CommandParser


@pytest.fixture
def show(capsys):
    def show(*arguments):
        """Return what is printed and the exit status."""
        parser = CommandParser(prog="octavo serve", description="serve a model")
        serve.add_arguments(parser)
        with pytest.raises(SystemExit) as caught:
            parser.parse_args(arguments)
        printed = capsys.readouterr()
        return printed.out + printed.err, caught.value.code

    return show


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_plain_help_names_every_option_by_group_in_a_screen(show, flag):
    text, status = show(flag)
    assert status == 0
    assert text.startswith("usage: octavo serve [MODEL] [options]\n")
    assert len(text.splitlines()) < 50
    assert max(map(len, text.splitlines())) <= 100
    for title, names in ENGINE_GROUPS.items():
        assert f"\n{title} " in text
        assert all(f"--{name.replace('_', '-')}" in text for name in names)


def test_help_of_all_says_what_options_do(show):
    text, status = show("--help=all")
    assert status == 0
    assert "Devices that share one model; only 1 runs today. [1]" in text
    assert "Port to listen on" in text


@pytest.mark.parametrize("word", ["Cache", "cache", "CacheConfig"])
def test_help_of_a_group_is_that_group(show, word):
    text, status = show(f"--help={word}")
    assert status == 0
    assert "--block-size" in text
    assert "--port" not in text


@pytest.mark.parametrize("word", ["block-size", "block_size", "--block-size"])
def test_help_of_an_option_is_that_option(show, word):
    text, status = show(f"--help={word}")
    assert status == 0
    assert "Tokens in one KV block" in text
    assert text.count("--") == 1


def test_help_of_a_word_is_all_that_mention_it(show):
    text, status = show("--help", "prefix")
    assert status == 0
    assert "--enable-prefix-caching" in text
    assert "--scheduling-policy" in text  # its help mentions prefixes
    assert "--port" not in text


def test_help_of_an_unknown_word_names_the_nearest(show):
    assert show("--help=block-sise") == (
        "octavo serve: no option has to do with 'block-sise'; did you mean --help=block-size?\n",
        2,
    )
    assert show("--help=xyzzy")[1] == 2
