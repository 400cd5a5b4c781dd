"""What ``import torch`` calls (entry point "torch.backends"): registers the backend ``holmes``.

It lives here, beside nothing that is compiled, because an error in it would make torch itself unusable.
"""

from __future__ import annotations

import warnings

__all__ = ["autoload"]


def autoload() -> None:
    """Registers the backend; where Holmes is half installed, warns and leaves torch alone. Local, never raises."""
    try:
        from holmes_comm import torch_backend

        torch_backend.register()
    except Exception as error:
        warnings.warn(
            f'torch.distributed backend "holmes" is not available: {error!r}; reinstall holmes-comm', stacklevel=2
        )
