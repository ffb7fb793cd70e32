"""Files of a Hugging Face repository, through huggingface_hub and its cache. HF_ENDPOINT and HF_HUB_OFFLINE hold."""

import re
from pathlib import Path

from tokasaurus.checkpoint.errors import CheckpointError

_REPO_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def is_repo_id(name: str) -> bool:
    """Whether `name` has the form `name` or `org/name`."""
    return _REPO_ID.fullmatch(name) is not None


def download_files(repo_id: str, patterns: list[str], revision: str | None = None) -> Path:
    """The local snapshot directory, with the files of the repository's root that match `patterns`.

    Its last component is the commit, which serves as `revision` of a later call. Shows its own progress bar.
    Raises CheckpointError if the repository is not found, gated, or out of reach and not in the cache.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    place = constants.ENDPOINT
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except GatedRepoError:
        raise CheckpointError(f"{repo_id} is gated: accept its terms at {place}/{repo_id} and set HF_TOKEN") from None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        where = f"at {place} that HF_TOKEN may read"
        raise CheckpointError(f"{repo_id} is no directory here and no repository {where}") from None
    except LocalEntryNotFoundError as error:
        if constants.is_offline_mode():
            reason = "HF_HUB_OFFLINE is set"
        else:
            cause = error.__cause__ or error
            reason = f"{place} does not answer ({type(cause).__name__})"
        raise CheckpointError(f"{repo_id} is not whole in the cache {constants.HF_HUB_CACHE}, and {reason}") from None
    except HFValidationError:
        raise CheckpointError(f"{repo_id!r} is no directory, no .gguf file and no Hugging Face repository id") from None
    except (HfHubHTTPError, OSError) as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"cannot download {repo_id} from {place}: {first_line}") from error
