"""Errors: the tree that callers catch, and what each carries."""

import pytest

from octavo import errors


@pytest.mark.parametrize(
    ("error", "parents"),
    [
        (errors.InvalidRequestError, (errors.OctavoError, ValueError)),
        (errors.BatchRefusedError, (errors.InvalidRequestError,)),
        (errors.ConfigError, (errors.OctavoError, ValueError)),
        (errors.ModelLoadError, (errors.ConfigError,)),
        (errors.QueueFullError, (errors.OctavoError,)),
        (errors.EngineDeadError, (errors.OctavoError,)),
    ],
)
def test_each_error_is_caught_by_its_family(error, parents):
    assert all(issubclass(error, parent) for parent in parents)


def test_the_docstring_draws_every_error():
    drawn = {word for word in errors.__doc__.split() if word.endswith("Error")}
    defined = {name for name in vars(errors) if name.endswith("Error")}
    assert drawn == defined | {"ValueError"} or drawn == defined


def test_a_refused_request_carries_the_parameter():
    error = errors.InvalidRequestError("n is 0", parameter="n")
    assert (str(error), error.message, error.parameter) == ("n is 0", "n is 0", "n")
    assert errors.InvalidRequestError("too long").parameter is None


def test_a_refused_batch_carries_the_outputs_of_the_others():
    error = errors.BatchRefusedError("1 of 2 prompts was refused", outputs=("done", None))
    assert error.outputs == ["done", None]


def test_a_full_queue_says_why_and_when_to_come_back():
    error = errors.QueueFullError("4 requests wait", reason_code="requests", retry_after_s=2.5)
    assert (error.reason_code, error.retry_after_s) == ("requests", 2.5)
