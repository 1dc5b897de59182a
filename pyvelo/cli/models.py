"""`pyvelo pull`, `pyvelo list` and `pyvelo rm`: models by name, and the cached ones."""

from __future__ import annotations

from typing import Any

from pyvelo.cli.exits import ERROR
from pyvelo.cli.terminal import agreed, print_error, print_json, print_out
from pyvelo.cli.values import show_bytes
from pyvelo.models.hub import CachedModel, ModelChoiceError, cached_models, choice_names, pull
from pyvelo.models.hub_removal import plan_removal, remove

__all__ = ["pull_model", "remove_model", "show_cached"]


def pull_model(name: str, *, as_json: bool) -> int:
    """Download a model; print its path, or the models that match the name. Return the exit code."""
    try:
        pulled = pull(name)
    except ModelChoiceError as error:
        if not as_json:
            raise
        print_json({"error": str(error), "repo": error.repo, "choices": choice_names(error.choices)})
        return ERROR
    if as_json:
        print_json(
            {
                "repo": pulled.repo,
                "tag": pulled.tag,
                "path": str(pulled.paths[0]),
                "files": [str(path) for path in pulled.paths],
                "bytes": pulled.n_bytes,
                "was_cached": pulled.was_cached,
            }
        )
        return 0
    done = "was cached already" if pulled.was_cached else "is here"
    print_error(f"pyvelo: {pulled.repo}:{pulled.tag}, {show_bytes(pulled.n_bytes)}, {done}")
    print_out(str(pulled.paths[0]))
    return 0


def show_cached(*, as_json: bool) -> int:
    """Print the complete models in the cache, as a table or JSON; return the exit code."""
    from pyvelo.cli.render import print_models

    models = cached_models()
    if as_json:
        print_json({"models": [_as_dict(model) for model in models]})
    elif models:
        print_models([(model.name, show_bytes(model.n_bytes), str(model.paths[0])) for model in models])
    else:
        print_error("pyvelo: no model is cached: pyvelo pull ORG/REPO:QUANT brings one")
    return 0


def remove_model(name: str, *, ask: bool, as_json: bool) -> int:
    """Remove a cached model, if the user agrees; print what was removed. Return the exit code."""
    removal = plan_removal(name)
    size = show_bytes(removal.n_bytes)
    if ask and not agreed(f"remove {removal.name}, {size}?"):
        return ERROR
    remove(removal)
    if as_json:
        files = [str(path) for path in removal.links]
        print_json({"name": removal.name, "repo": removal.repo, "files": files, "bytes": removal.n_bytes})
    else:
        print_out(f"removed {removal.name}, {size}")
    return 0


def _as_dict(model: CachedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "repo": model.repo,
        "tag": model.tag,
        "path": str(model.paths[0]),
        "files": [str(path) for path in model.paths],
        "bytes": model.n_bytes,
        "last_used": model.used,
    }
