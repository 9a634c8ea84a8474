"""Downloads from the Hugging Face Hub, and says in one sentence why one failed.

``source`` imports this only when something is to be downloaded: its client takes long to import.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from octavo.errors import ConfigError

_IGNORED_FILES = ("*/*", "consolidated*", "adapter_*")
# The HTTP library under the Hub client has changed with its versions; its errors are these.
_HUB_ERRORS: tuple[type[BaseException], ...] = (
    OSError,
    HFValidationError,
    *HfHubHTTPError.__bases__,
)


def fetch(
    repository: str,
    *,
    files: Sequence[str],
    token: str | None,
    revision: str | None,
    download: Callable[..., str] | None = None,
) -> Path:
    """Download the files that match, with ``download`` if it is given; return their folder.

    Raises:
        ConfigError: there is no such repository or revision, or it cannot be had.
    """
    try:
        folder = (download or snapshot_download)(
            repository,
            revision=revision,
            token=token,
            allow_patterns=list(files),
            ignore_patterns=list(_IGNORED_FILES),
        )
    except _HUB_ERRORS as error:
        raise ConfigError(_explain(error, repository, revision)) from error
    return Path(folder)


def _explain(error: BaseException, repository: str, revision: str | None) -> str:
    page = f"https://huggingface.co/{repository}"
    match error:
        case GatedRepoError():
            return f"{repository} is gated: accept its terms at {page} and set HF_TOKEN"
        case RepositoryNotFoundError():
            return (
                f"{repository} is neither a folder here nor a model on the Hub that may be read;"
                " check the spelling, or set HF_TOKEN if it is private"
            )
        case RevisionNotFoundError():
            return f"{repository} has no revision {revision} on the Hub; see {page}"
        case LocalEntryNotFoundError() if isinstance(error.__cause__, OfflineModeIsEnabled):
            return (
                f"HF_HUB_OFFLINE is set and {repository} is not in the local cache;"
                " unset it once, or name a folder"
            )
        case LocalEntryNotFoundError():
            return (
                f"the Hub cannot be reached and {repository} is not in the local cache;"
                " check the network, or name a folder"
            )
    reason = " ".join(str(error).split())
    return f"cannot download {repository} from the Hub: {reason}"
