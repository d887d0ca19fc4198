"""Codecs: the autoencoder between images in [-1, 1] and the latents that a model works on.

    z = (encode(image) - shift) * scale, of about unit variance; decode is its inverse

| class of diffusers | encodes to | its latents |
|---|---|---|
| `AutoencoderKL`, `AsymmetricAutoencoderKL` | a Gaussian per pixel: mean or sample | as trained |
| `AutoencoderDC`, `VQModel` | latents | as trained |
| `AutoencoderTiny` (TAESD) | latents | scaled already, as the model takes them: scale 1, shift 0 |

Scale and shift come from the config. Where it gives the latents' mean and standard deviation per
channel, shift is the mean and scale is divided by the deviation.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from stillhouse.errors import UserError
from stillhouse.metrics.exact import exactly
from stillhouse.process import keyed_normal

# Which key of the config lists the encoder's widths: each after the first halves the side.
AUTOENCODERS: dict[str, str] = {
    "AsymmetricAutoencoderKL": "down_block_out_channels",
    "AutoencoderDC": "encoder_block_out_channels",
    "AutoencoderKL": "block_out_channels",
    "AutoencoderTiny": "encoder_block_out_channels",
    "VQModel": "block_out_channels",
}
Mode = Literal["mean", "sample"]
LARGE = 1024  # pixels a side up to which images are decoded whole, if nothing else is said
OVERLAP = 0.25


class Moments(NamedTuple):
    """The Gaussian that an image is encoded to, scaled as latents are."""

    mean: Tensor
    std: Tensor | None  # None where the encoder gives latents themselves


class Tiles(NamedTuple):
    """Squares that a large image is taken in, in latent pixels."""

    side: int
    overlap: int


class Codec(nn.Module):
    """A diffusers autoencoder with its latent scaling applied."""

    scale: Tensor
    shift: Tensor

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder
        config: Any = autoencoder.config
        self.downscale = 2 ** (len(config[_widths(autoencoder)]) - 1)
        """Pixels of an image along the side of one pixel of its latents."""
        self.image_channels: int = config.in_channels
        self.latent_channels: int = config.get("vq_embed_dim") or config.latent_channels
        self.tiles: Tiles | None = None
        self._digests: dict[torch.dtype, str] = {}
        scale, shift = config.get("scaling_factor") or 1.0, config.get("shift_factor") or 0.0
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if mean is not None and std is not None:
            scale, shift = scale / _per_channel(std), _per_channel(mean)
        self.register_buffer("scale", torch.as_tensor(scale), persistent=False)
        self.register_buffer("shift", torch.as_tensor(shift), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "Codec":
        """Moves all, casts all but the scaling: bfloat16 would be off by up to 0.4%."""
        exact = (self.scale, self.shift)
        super()._apply(fn, recurse)
        self.scale, self.shift = (kept.to(self.scale.device) for kept in exact)
        return self

    # ------------------------------------------------------------ both ways

    def encode(
        self,
        images: Tensor,
        mode: Mode = "mean",
        *,
        keys: Tensor | Sequence[int] | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Latents in float32 of images in [-1, 1]; no gradients.

        `sample` draws each image's latents by its key, so that no split of a batch changes them.
        An encoder that gives latents themselves has nothing to draw.
        """
        mean, std = self.moments(images)
        if mode == "mean" or std is None:
            return mean
        if keys is None or len(keys) != len(images):
            raise ValueError(f"{0 if keys is None else len(keys)} keys for {len(images)} images")
        noise = keyed_normal(mean.shape[1:], keys, seed=seed, purpose="latent")
        return mean + std * noise.to(mean)

    def moments(self, images: Tensor) -> Moments:
        """Mean and deviation of the images' latents, to keep and draw from later."""
        self.latent_shape(tuple(images.shape[1:]))
        weights = next(self.autoencoder.parameters())
        with exactly(weights.device):
            native = self._in_tiles(
                self._encode, images.to(weights), self.tiles, inward=self.downscale
            )
            mean, *deviation = native.split(self.latent_channels, 1)
            std = deviation[0] * self.scale.abs() if deviation else None
            return Moments((mean - self.shift) * self.scale, std)

    def decode(self, latents: Tensor) -> Tensor:
        """Images in float32, in [-1, 1] up to the decoder's own overshoot.

        Those of more than `LARGE` pixels a side are made in tiles of that size.
        """
        weights = next(self.autoencoder.parameters())
        native = (latents.to(self.scale) / self.scale + self.shift).to(weights)
        tiles = self.tiles or self._tiles(LARGE, OVERLAP)
        return self._in_tiles(self._decode, native, tiles, outward=self.downscale)

    def latent_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Of images of this shape, channels first."""
        channels, *sides = shape
        if len(sides) != 2 or channels != self.image_channels:
            raise UserError(
                f"this codec takes images of {self.image_channels} channels, height and width, not "
                f"of shape {tuple(shape)}"
            )
        height, width = (side // self.downscale for side in sides)
        if [height * self.downscale, width * self.downscale] != sides or not height * width:
            raise UserError(
                f"images of {sides[0]} x {sides[1]} pixels have no latents: this codec takes sides "
                f"that are multiples of {self.downscale}, so crop or resize them"
            )
        return self.latent_channels, height, width

    def _encode(self, images: Tensor) -> Tensor:
        """[B, C, h, w], or mean and deviation as [B, 2C, h, w]."""
        autoencoder: Any = self.autoencoder
        # A CPU convolves a single image in another way, with other last bits: it gets two.
        alone = len(images) == 1 and images.device.type == "cpu"
        found = autoencoder.encode(images.expand(2, -1, -1, -1) if alone else images)
        if hasattr(found, "latent_dist"):
            latents = torch.cat([found.latent_dist.mean, found.latent_dist.std], 1)
        else:
            latents = found.latents if hasattr(found, "latents") else found.latent
        return latents[: len(images)].float()

    def _decode(self, native: Tensor) -> Tensor:
        autoencoder: Any = self.autoencoder
        return autoencoder.decode(native).sample.float()

    # ------------------------------------------------------------ large images

    def enable_tiling(self, side: int = 512, overlap: float = OVERLAP) -> "Codec":
        """Images with more pixels a side than this go through in overlapping squares, blended.

        Memory then follows the square, not the image. diffusers' own tiling is not used: that of
        `AutoencoderTiny` takes 4 latent channels only, that of an `AutoencoderDC` with a downscale
        of 128 gives 7 x 7 latents instead of 8 x 8, and the others have none or the same thing.
        """
        self.tiles = self._tiles(side, overlap)
        return self

    def _tiles(self, side: int, overlap: float) -> Tiles:
        whole = side // self.downscale
        if whole < 2 or not 0 <= overlap < 1:
            raise ValueError(
                f"tiles of {side} pixels that share {overlap}: this codec takes at least "
                f"{2 * self.downscale} pixels and a share within [0, 1)"
            )
        return Tiles(whole, min(round(whole * overlap), whole - 1))

    @staticmethod
    def _in_tiles(
        function: Callable[[Tensor], Tensor],
        x: Tensor,
        tiles: Tiles | None,
        inward: int = 1,
        outward: int = 1,
    ) -> Tensor:
        """`inward` and `outward` are the pixels of input and output per pixel of the latents."""
        height, width = (side // inward for side in x.shape[-2:])
        if tiles is None or max(height, width) <= tiles.side:
            return function(x)
        whole = None
        for down, tall in _spans(height, tiles, outward):
            for across, wide in _spans(width, tiles, outward):
                done = function(x[..., _times(down, inward), _times(across, inward)])
                if whole is None:
                    whole = done.new_zeros(*done.shape[:2], height * outward, width * outward)
                part = whole[..., _times(down, outward), _times(across, outward)]
                part += (tall[:, None] * wide).to(done) * done
        assert whole is not None
        return whole

    # ------------------------------------------------------------ what it is

    @property
    def digest(self) -> str:
        """SHA-256 over class, config and weights in the precision that they have here."""
        dtype = next(self.autoencoder.parameters()).dtype
        if dtype not in self._digests:
            self._digests[dtype] = _digest(self.autoencoder)
        return self._digests[dtype]


def _widths(autoencoder: nn.Module) -> str:
    names = [base.__name__ for base in type(autoencoder).__mro__]
    known = next((name for name in names if name in AUTOENCODERS), None)
    if known is None:
        raise UserError(f"a {names[0]} is no codec; supported: {', '.join(AUTOENCODERS)}")
    return AUTOENCODERS[known]


def _per_channel(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)


def _spans(length: int, tiles: Tiles, outward: int) -> list[tuple[slice, Tensor]]:
    """Tiles along one side, the last ending with it, and the weights of what they give.

    A tile counts nothing in the outer quarter of what it shares, where it misses what lies beyond
    its edge, and more and more over the next two. All weights add up to 1 everywhere.
    """
    side, margin = min(tiles.side, length), tiles.overlap // 4
    starts = [*range(0, length - side, tiles.side - tiles.overlap), length - side]
    spans = [slice(at, at + side) for at in starts]
    inner = (tiles.overlap - 2 * margin) * outward
    rise = ((torch.arange(side * outward) - margin * outward + 1) / (inner + 1)).clamp(0, 1)
    ramps = [rise ** (at > 0) * rise.flip(0) ** (at + side < length) for at in starts]
    total = torch.zeros(length * outward)
    for span, ramp in zip(spans, ramps, strict=True):
        total[_times(span, outward)] += ramp
    return [(s, r / total[_times(s, outward)]) for s, r in zip(spans, ramps, strict=True)]


def _times(span: slice, factor: int) -> slice:
    return slice(span.start * factor, span.stop * factor)


def _digest(autoencoder: Any) -> str:
    found = hashlib.sha256(type(autoencoder).__name__.encode())
    public = {k: v for k, v in autoencoder.config.items() if not k.startswith("_")}
    found.update(json.dumps(public, sort_keys=True, default=str).encode())
    for name, weights in sorted(autoencoder.state_dict().items()):
        found.update(f"{name} {weights.dtype} {list(weights.shape)}".encode())
        found.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return f"sha256:{found.hexdigest()}"
