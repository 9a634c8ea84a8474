import pytest

from octavo.entrypoints.cli.sizes import read_size


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8192", 8192),
        ("0", 0),
        ("-1", -1),
        ("1k", 1_000),
        ("1K", 1_024),
        ("25.6k", 25_600),
        ("25.6K", 26_214),
        ("0.1k", 100),
        ("2m", 2_000_000),
        ("2M", 2 * 2**20),
        ("1g", 10**9),
        ("1.5G", 3 * 2**29),
        ("1t", 10**12),
        ("1T", 2**40),
    ],
)
def test_numbers_are_read_as_people_write_them(text, number):
    assert read_size(text) == number


@pytest.mark.parametrize(
    "text", ["", "k", "1.5", "1kk", "1 k", "1e3", "1x", "²", "٣", "-1k", "nan"]
)
def test_what_is_no_whole_number_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match="is not a whole number") as refused:
        read_size(text)
    assert repr(text) in str(refused.value)
