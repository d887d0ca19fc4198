"""Small denoisers of every family, and what a test sees of their inside with hooks of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from small_models import build_network, network_config, random_condition, small_unet, unit_noise
from torch import Tensor, nn

from stillhouse.features.catalogue import catalogue
from stillhouse.features.extractor import Extractor
from stillhouse.models import DiffusersNetwork
from stillhouse.models.backbones import build_mdt, build_mmdit, build_pixart, build_unet
from stillhouse.process import VP, Condition, Flow, NetworkDenoiser

TABLE = torch.linspace(0.999, 0.01, 1000)  # any falling alphas_cumprod
TOKENS = 5
ATTENTION = {
    "down_block_types": ("AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D"),
    "mid_block_scale_factor": 2,
}


def seeded(build: Callable[..., Any], *args: Any, **config: Any) -> Any:
    torch.manual_seed(0)
    return build(*args, **config)


FOUR = {"channels": 4, "resolution": 16}
BUILDERS: dict[str, Callable[[], Any]] = {
    **{
        name: lambda name=name: build_network(network_config(name, reduced=True))
        for name in ("sd15", "sdxl", "pixart-alpha", "sd3", "dit-xl-2")
    },
    "sd35": lambda: build_network(
        network_config("sd3", reduced=True)
        | {"dual_attention_layers": (0, 2), "qk_norm": "rms_norm"}
    ),
    "unet2d": lambda: small_unet(**ATTENTION),
    "unet2d-resnet": lambda: small_unet(
        down_block_types=("ResnetDownsampleBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "ResnetUpsampleBlock2D"),
        add_attention=False,
    ),
    "mdt": lambda: seeded(build_mdt, "tiny", **FOUR, classes=10),
    "mmdit": lambda: seeded(build_mmdit, "tiny", **FOUR, token_width=24),
    "pixart-qk": lambda: seeded(build_pixart, "tiny", **FOUR, token_width=24, qk_norm=True),
    "unet-qk": lambda: seeded(build_unet, "tiny", **FOUR, token_width=24, qk_norm=True),
}


def fill_zeros(model: nn.Module) -> None:
    """Those that published networks start from, so that all is alive."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta and not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def denoiser_of(model: nn.Module) -> NetworkDenoiser:
    """In eval mode, without zeros."""
    fill_zeros(model)
    flow = hasattr(model, "context_embedder")
    scaling, prediction = (Flow(), "flow") if flow else (VP(TABLE), "eps")
    return NetworkDenoiser(DiffusersNetwork(model), scaling, prediction).eval()


def small_denoiser(name: str) -> NetworkDenoiser:
    return denoiser_of(BUILDERS[name]())


def inputs(
    denoiser: NetworkDenoiser, count: int = 2, size: tuple[int, int] | None = None
) -> tuple[Tensor, Condition]:
    network: Any = denoiser.network
    channels, *own = network.data_shape
    x = unit_noise((count, channels, *(size or own)))
    return x, random_condition(network.condition_shapes, count, TOKENS)


def extract(
    denoiser: NetworkDenoiser,
    ids: list[str] | None = None,
    *,
    sigma: Any = 0.5,
    size: tuple[int, int] | None = None,
    early_stop: bool = True,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Of two images; every activation unless `ids` are given."""
    model: Any = denoiser.network.model
    extractor = Extractor(
        denoiser, ids or list(catalogue(model)), sigma=sigma, early_stop=early_stop
    )
    x, cond = inputs(denoiser, size=size)
    return extractor.extract(x, cond, key=[0, 1], seed=seed)


@contextmanager
def watched(model: nn.Module, path: str) -> Iterator[dict[str, Any]]:
    """What a module takes and puts out, while the block runs."""
    seen: dict[str, Any] = {"calls": 0}

    def see(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen["calls"] += 1
        seen["input"] = args[0] if args else kwargs.get("hidden_states")
        seen["output"] = output

    handle = model.get_submodule(path).register_forward_hook(see, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def as_tokens(features: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, N, C]."""
    return features.flatten(2).mT
