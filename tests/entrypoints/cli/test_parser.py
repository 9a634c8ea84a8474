import pytest

from octavo.entrypoints.cli.parser import CommandParser


@pytest.fixture
def parser():
    parser = CommandParser(prog="octavo work")
    parser.add_argument("file", nargs="?")
    parser.add_argument("--max-model-len", type=int, default=0)
    parser.add_argument("--text", default="")
    parser.add_argument("--hidden-thing", help="==SUPPRESS==")
    return parser


def refuse(parser, capsys, *arguments):
    """Return the sentence with which a command line is refused."""
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo work: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-model-len", "5"],
        ["--max_model_len", "5"],
        ["--max_model-len=5"],
        ["--max-model-len=5"],
    ],
)
def test_flags_are_written_with_dashes_or_underscores(parser, arguments):
    assert parser.parse_args(arguments).max_model_len == 5


def test_values_keep_their_underscores(parser):
    assert parser.parse_args(["--text=--a_b"]).text == "--a_b"
    assert parser.parse_args(["--text", "a_b"]).text == "a_b"
    assert parser.parse_args(["--", "--a_b"]).file == "--a_b"


@pytest.mark.parametrize("flag", ["--max-model-length", "--maxmodellen", "--max_model", "--max-m"])
def test_unknown_flag_names_the_nearest(parser, capsys, flag):
    sentence = refuse(parser, capsys, f"{flag}=secret")
    assert "is not an option; did you mean --max-model-len?" in sentence
    assert "secret" not in sentence


def test_flag_like_no_other_points_to_the_help(parser, capsys):
    assert "--xyzzy is not an option; --help" in refuse(parser, capsys, "--xyzzy", "secret")
    assert "-x is not an option" in refuse(parser, capsys, "-x")


def test_shortened_flag_is_not_guessed(parser, capsys):
    assert "--tex is not an option; did you mean --text?" in refuse(parser, capsys, "--tex", "a")


def test_part_of_a_hidden_flag_is_named(parser, capsys):
    assert "belongs to something" in refuse(parser, capsys, "--hidden-thing.mode", "3")


def test_surplus_arguments_are_counted_and_not_shown(parser, capsys):
    sentence = refuse(parser, capsys, "a", "secret", "secret")
    assert "2 arguments are too many" in sentence
    assert "1 argument is too many" in refuse(parser, capsys, "a", "secret")
    assert "secret" not in sentence
