"""An exported folder to the hub. The token is that of huggingface_hub's own login, seen by nobody.

Files are named one by one: what else lies in the folder stays where it is.
"""

from collections.abc import Sequence
from pathlib import Path

from stillhouse.errors import UserError, one_line
from stillhouse.pipelines import is_hub_id

MESSAGE = "Exported by stillhouse"


def check_name(repo: str) -> None:
    """Before anything is written."""
    if repo and not is_hub_id(repo):
        raise UserError(f"--push-to {repo}: a repository of the hub is named OWNER/NAME")


def push(folder: Path, files: Sequence[str], repo: str, *, private: bool) -> str:
    """Uploads these files of the folder; returns where they are to be seen."""
    from huggingface_hub import HfApi, constants, get_token

    stays = f"{folder} is written, and stays"
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"HF_HUB_OFFLINE is set, so nothing was pushed; {stays}. Unset it to push")
    token = get_token()
    if token is None:
        raise UserError(
            "the hub asks who you are: run `hf auth login`, or set HF_TOKEN, and push again; "
            f"{stays}"
        )
    size = sum((folder / name).stat().st_size for name in files)
    kind = "private" if private else "public unless its owner has chosen otherwise"
    print(f"{repo} ({kind}, where it is new) gets {len(files)} files, {size / 1e6:.1f} MB:")
    print("\n".join(f"  {name}" for name in files), flush=True)
    api = HfApi()
    try:
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=list(files),
            commit_message=MESSAGE,
        )
    except Exception as error:  # a refusal, or whatever the network's client raises
        why = one_line(error).replace(token, "***")
        raise UserError(f"{repo} could not be pushed ({why}); {stays}") from None
    return str(url)
