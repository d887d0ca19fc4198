"""`Extractor`: activations of a denoiser as features of images.

    features = Extractor(denoiser, ["up-level1-repeat2-res-out"], t=50).extract(x, key=[0, 1])

The image is noised to the level sigma, x + sigma * noise, and the network run once, as far as the
last wanted activation. The noise of an image follows from its key, the seed and the level alone.
`stillhouse.recipes.features.Features` does the same for pictures and prompts.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stillhouse.errors import UserError
from stillhouse.features.catalogue import catalogue, look_up
from stillhouse.features.hooks import read
from stillhouse.process import Condition, NetworkDenoiser, Scaling, keyed_normal

Levels = float | Sequence[float] | Tensor


class Extractor:
    """Features at their own resolution: id -> [B, C, H, W], in the network's dtype.

    The noise level is `sigma`, or that of the timestep `t` of the model's own process; one, or
    several, run together: then id -> [B, levels, C, H, W].
    """

    def __init__(
        self,
        denoiser: NetworkDenoiser,
        ids: Sequence[str],
        *,
        sigma: Levels | None = None,
        t: Levels | None = None,
        early_stop: bool = True,
    ) -> None:
        self.denoiser = denoiser
        self.model = inner_model(denoiser)
        self.catalogue = catalogue(self.model)
        self.activations = look_up(self.catalogue, ids)
        levels = _levels(denoiser.scaling, sigma, t)
        self.several = levels.ndim > 0
        self.sigmas: list[float] = levels.flatten().tolist()
        self.early_stop = early_stop

    def extract(
        self,
        x: Tensor,
        cond: Condition | None = None,
        *,
        key: Tensor | Sequence[int],
        seed: int = 0,
    ) -> dict[str, Tensor]:
        """Of clean images or latents [B, C, H, W]; `key` [B] says which image is which."""
        if x.ndim != 4 or len(key) != len(x):
            raise ValueError(f"images [B, C, H, W] and B keys, not {[*x.shape]} and {len(key)}")
        if self.denoiser.training:
            raise UserError("features of a network in training are not its own: call .eval() first")
        count = len(self.sigmas)
        noisy = torch.stack([self._noised(x, key, seed, s) for s in self.sigmas], dim=1)
        sigma = torch.tensor(self.sigmas, dtype=torch.float64, device=x.device).repeat(len(x))
        if cond is not None and count > 1:
            cond = cond[torch.arange(len(x), device=x.device).repeat_interleave(count)]

        def run() -> Tensor:
            return self.denoiser(noisy.flatten(0, 1), sigma, cond)

        found = read(self.model, self.activations, run, early_stop=self.early_stop)
        if not self.several:
            return found
        return {name: value.unflatten(0, (len(x), count)) for name, value in found.items()}

    def _noised(self, x: Tensor, key: Tensor | Sequence[int], seed: int, sigma: float) -> Tensor:
        # Rounded: the last digits of a level that was computed differ between machines.
        purpose = f"features/{sigma:.6g}"
        noise = keyed_normal(x.shape[1:], key, seed=seed, purpose=purpose)
        return x + sigma * noise.to(x)


def _levels(scaling: Scaling, sigma: Levels | None, t: Levels | None) -> Tensor:
    """One noise level, or a row of them."""
    if sigma is not None and t is None:
        return _row(sigma, math.inf, "sigma is one noise level or a row of them, from 0 up")
    if t is not None and sigma is None:
        most = scaling.time_max
        return scaling.sigma_at(_row(t, most, f"t is a timestep or a row of them, 0 to {most:g}"))
    raise UserError("how noisy the images are made is said once: give either sigma or t")


def _row(given: Levels, most: float, rule: str) -> Tensor:
    values = torch.as_tensor(given, dtype=torch.float64)
    inside = bool(((values >= 0) & (values <= most)).all())
    if values.ndim > 1 or not values.numel() or not inside:
        raise UserError(f"{rule}, not {given}")
    return values


def inner_model(denoiser: nn.Module) -> nn.Module:
    """diffusers' network within a denoiser."""
    model = getattr(getattr(denoiser, "network", None), "model", None)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"features are read from a denoiser around a network of diffusers, not from a "
            f"{type(denoiser).__name__}: give the one that load_denoiser returns"
        )
    return model
