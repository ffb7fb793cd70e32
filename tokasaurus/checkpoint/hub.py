"""Downloads from Hugging Face with huggingface_hub and its cache. HF_ENDPOINT and HF_HUB_OFFLINE are honoured."""

import logging
import os
import re
from contextlib import nullcontext
from pathlib import Path

from tokasaurus.addresses import proxies_for
from tokasaurus.checkpoint.cache import cache_directory
from tokasaurus.checkpoint.errors import CheckpointError
from tokasaurus.messages.status import UserError

logger = logging.getLogger(__name__)

# In every folder whose name does not begin like additional_chat_templates; "*" also matches "/".
_IN_FOLDERS = ["[!a]*/*", "a[!d]*/*"]
_REPO_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def is_repo_id(name: str) -> bool:
    """Whether `name` has the form `name` or `org/name`."""
    return _REPO_ID.fullmatch(name) is not None


def download_files(repo_id: str, patterns: list[str], revision: str | None = None) -> Path:
    """The local snapshot directory, with the files that match `patterns`, at the repository's top level or
    in additional_chat_templates.

    The directory's name is the commit, which a later call can pass as `revision`. Shows a progress bar. A cached file
    whose size is not the one that the hub lists is downloaded again.
    Raises CheckpointError if the repository is not found, is gated, or is neither reachable nor completely cached.
    """
    _give_it_a_home()
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    endpoint = constants.ENDPOINT
    try:
        with nullcontext() if constants.is_offline_mode() else proxies_for(endpoint):
            directory = Path(
                snapshot_download(repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=_IN_FOLDERS)
            )
            wrong = _wrong_sizes(repo_id, directory)
            if wrong and not constants.is_offline_mode():
                logger.warning("%s: %s; downloading again", directory, "; ".join(wrong.values()))
                snapshot_download(repo_id, revision=directory.name, allow_patterns=list(wrong), force_download=True)
                wrong = _wrong_sizes(repo_id, directory)
        for name, what in wrong.items():
            raise CheckpointError(f"{what}; delete {(directory / name).resolve()} to download it again")
        return directory
    except GatedRepoError:
        raise CheckpointError(
            f"{repo_id} is gated: accept its terms at {endpoint}/{repo_id} and set HF_TOKEN"
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        where = f"at {endpoint} that HF_TOKEN may read"
        raise CheckpointError(f"{repo_id} is neither a directory here nor a repository {where}") from None
    except LocalEntryNotFoundError as error:
        if constants.is_offline_mode():
            reason = "HF_HUB_OFFLINE is set"
        else:
            cause = error.__cause__ or error
            reason = f"{endpoint} does not answer ({type(cause).__name__})"
        raise CheckpointError(
            f"{repo_id} is not completely in the cache {constants.HF_HUB_CACHE}, and {reason}"
        ) from None
    except HFValidationError:
        raise CheckpointError(
            f"{repo_id!r} is neither a directory nor a .gguf file nor a Hugging Face repository id"
        ) from None
    except CheckpointError:
        raise
    except UserError as error:  # a proxy that cannot be used
        raise CheckpointError(f"cannot download {repo_id} from {endpoint}: {error}") from None
    except (HfHubHTTPError, OSError) as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"cannot download {repo_id} from {endpoint}: {first_line}") from error


def _give_it_a_home() -> None:
    """Call it before huggingface_hub is imported: without a home directory, its cache would be the directory `~` in the
    current one."""
    try:
        Path.home()
    except RuntimeError:
        os.environ.setdefault("HF_HOME", str(cache_directory() / "huggingface"))


def _wrong_sizes(repo_id: str, directory: Path) -> dict[str, str]:
    """Files of the snapshot whose size is not the one that the hub lists: name -> one line that says so.

    huggingface_hub stores the list beside the snapshot, but does not compare it with files that it has in its cache.
    """
    try:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
    except ImportError:  # versions before this function store no list
        return {}
    try:
        listed = {file.path: file.size for file in get_cached_repo_tree(repo_id, revision=directory.name)}
    except CachedRepoTreeNotFoundError:  # downloaded by such a version
        return {}
    sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
    return {
        name: f"{name} of {repo_id} has {size} bytes instead of {listed[name]}"
        for name, size in sizes.items()
        if name in listed and size != listed[name]
    }
