"""``octavo serve --config``: what a file may say, and what is refused in one sentence."""

import pytest

from octavo.entrypoints import serving
from octavo.entrypoints.cli.main import main


@pytest.fixture
def started(monkeypatch):
    """The settings with which servers would have been started."""
    calls = []

    def serve(config, settings):
        calls.append((config, settings))
        return 0

    monkeypatch.setattr(serving, "serve", serve)
    return calls


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "octavo.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def refuse(capsys, started):
    def refuse(*arguments):
        """Return the sentence with which the command line is refused."""
        try:
            status = main(["serve", *arguments])
        except SystemExit as end:
            status = end.code
        error = capsys.readouterr().err
        assert status == 2
        assert error.startswith("octavo")
        assert error.count("\n") == 1
        assert not started
        return error

    return refuse


def test_keys_are_flags_with_dashes_or_underscores(started, write):
    text = """
        model: somewhere/tiny
        port: 9000
        max_model_len: 8k
        block-size: 32
        gpu-memory-utilization: 0.5
        enable-prefix-caching: false
        enforce_eager: true
        served-model-name: [a, "--b"]
        cuda-graph-sizes: [1, 2]
        revision: null
    """
    assert main(["serve", "--config", write(text)]) == 0
    ((config, settings),) = started
    assert (config.model, config.max_model_len, config.block_size) == ("somewhere/tiny", 8_000, 32)
    assert (config.gpu_memory_utilization, config.cuda_graph_sizes) == (0.5, [1, 2])
    assert (config.enable_prefix_caching, config.enforce_eager) == (False, True)
    assert (config.revision, settings.port) == (None, 9000)
    assert settings.served_model_name == ("a", "--b")


def test_command_line_wins(started, write):
    path = write("model: a\nport: 9000\nserved-model-name: [x, y]\nenforce-eager: true")
    line = ["b", "--port", "1", "--served-model-name", "z", "--no-enforce-eager"]
    assert main(["serve", *line, "--config", path]) == 0
    ((config, settings),) = started
    assert (config.model, config.enforce_eager) == ("b", False)
    assert (settings.port, settings.served_model_name) == (1, ("z",))


def test_empty_file_says_nothing(started, write):
    assert main(["serve", "--config", write("# nothing\n")]) == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max-modl-len: 5", "--max-modl-len is not an option; did you mean --max-model-len?"),
        ("config: x", "--config is not an option"),
        ("help: x", "--help is not an option"),
        ("5: x", "--5 is not an option"),
        ("port: eight", "argument --port: 'eight' is not a whole number"),
        ("port: [1, 2]", "argument --port: '[1, 2]' is not a whole number"),
        ("port: {a: 1}", "argument --port: '{\"a\": 1}' is not a whole number"),
        ("port: true", "--port takes a value; it must not be true"),
        ("stall-timeout: soon", "argument --stall-timeout: 'soon' is not a number"),
        ("enforce-eager: 5", "--enforce-eager is a switch; it must be true or false"),
        ("served-model-name: [[a]]", "argument --served-model-name: it takes texts"),
        ("served-model-name: [1]", "argument --served-model-name: it takes texts"),
        ("dtype: int3", "invalid choice: 'int3'"),
        ("block-size: 1\nblock_size: 2", "--block-size stands there twice"),
        ("port: 1\nblock-size: 1\nport: 2", "which has the key port twice"),
        ("port: 1\n'port': 1", "which has the key port twice"),
        ("enable-lora: true", "--enable-lora asks for something that Octavo does not have"),
        ('uds: "a\\0b"', "--uds has a character that no command line could have"),
        ("- a", "which must have lines like max-model-len: 8k"),
        ("text", "which must have lines like"),
        ("a: [", "which is not YAML"),
        ("a: !!python/object:os.system {}", "which is not YAML"),
    ],
)
def test_what_a_file_may_not_say_is_one_sentence_with_its_name(refuse, write, text, sentence):
    path = write(text)
    said = refuse("--config", path)
    assert sentence in said
    assert path in said


def test_file_that_cannot_be_read_is_named(refuse, tmp_path):
    assert "No such file" in refuse("--config", str(tmp_path / "missing.yaml"))
    assert "Is a directory" in refuse("--config", str(tmp_path))


def test_model_is_given_once(refuse):
    assert "the model is given twice" in refuse("a", "--model", "b")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "70000"],
        ["--port", "-1"],
        ["--shutdown-timeout", "inf"],
        ["--shutdown-timeout", "-1"],
        ["--request-timeout", "nan"],
        ["--stall-timeout", "0"],
        ["--max-queued-requests", "0"],
        ["--block-size", "0"],
        ["--served-model-name", "[1]"],
        ["--served-model-name", "a", " "],
        ["--host", ""],
        ["--served-model-name", "[broken"],
    ],
)
def test_value_out_of_range_is_refused_before_anything_starts(refuse, arguments):
    name = arguments[0][2:]
    said = refuse(*arguments)
    assert name in said.replace("_", "-")
