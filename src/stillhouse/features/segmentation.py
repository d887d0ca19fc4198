"""Segmentation from features: what each pixel shows, learnt from a few labelled images or many.

| head | network | for |
|---|---|---|
| `pixel_mlp` | channels -> 128 -> 32 -> classes with BN; ten of them vote | a few images |
| `linear` | channels -> classes | many images |

Features of all activations are read at a pixel (bilinear) and put side by side, standardised by the
labelled pixels. Label-scarce: Baranchuk et al. 2022, "Label-Efficient Semantic Segmentation with
Diffusion Models".
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from stillhouse.errors import UserError
from stillhouse.features.probe import features_at
from stillhouse.process import keyed_uniform

IGNORE = 255
ROWS = 16  # lines of an image that are read at a time
CHANNELS = 64  # in float32 at a time

MakeHead = Callable[[int, int], nn.Module]  # channels, classes


def pixel_mlp(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(channels, 128),
        nn.ReLU(),
        nn.BatchNorm1d(128),
        nn.Linear(128, 32),
        nn.ReLU(),
        nn.BatchNorm1d(32),
        nn.Linear(32, classes),
    )


def linear(channels: int, classes: int) -> nn.Module:
    return nn.Linear(channels, classes)


HEADS: dict[str, MakeHead] = {"mlp": pixel_mlp, "linear": linear}

# ---------------------------------------------------------------- features of pixels


def pixel_features(maps: Sequence[Tensor], pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Rows [N, channels of all maps] at pixels (x, y) [N, 2] of an image of (width, height)."""
    device = maps[0].device
    places = (pixels.to(device, torch.float32) + 0.5) / torch.tensor(size, device=device)
    return torch.cat([features_at(one[None], places[None]) for one in maps], dim=1)


def labelled_pixels(mask: Tensor, count: int, *, key: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pixels (x, y) [n, 2] with their labels, at most `count` and none that are ignored.

    Which ones follows from the image's key and the seed.
    """
    rows, columns = (mask != IGNORE).nonzero(as_tuple=True)
    if len(rows) > count:
        drawn = keyed_uniform(range(len(rows)), seed=seed, purpose=f"pixels/{key}")
        chosen = drawn.argsort()[:count].sort().values
        rows, columns = rows[chosen], columns[chosen]
    return torch.stack([columns, rows], 1), mask[rows, columns].long()


# ---------------------------------------------------------------- heads


class Ensemble(nn.Module):
    """Heads that each say a class; the most frequent one is taken, of equals the first."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, heads: Sequence[nn.Module], mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    @torch.no_grad()
    def forward(self, rows: Tensor) -> Tensor:
        """Classes [N] of features [N, C]."""
        x = (rows - self.mean) / self.deviation
        logits = [head(x) for head in self.heads]
        votes = sum(one_hot(one.argmax(1), one.shape[1]) for one in logits)
        assert isinstance(votes, Tensor)
        return votes.argmax(1)

    def segment(self, maps: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
        """Classes [height, width] of an image of (width, height) pixels."""
        width, height = size
        device = maps[0].device
        lines = []
        for some in torch.arange(height, device=device).split(ROWS):
            pixels = torch.cartesian_prod(some, torch.arange(width, device=device)).flip(1)
            lines.append(self(pixel_features(maps, pixels, size)).view(len(some), width))
        return torch.cat(lines)


def fit(
    make: MakeHead,
    rows: Tensor,
    labels: Tensor,
    classes: int,
    *,
    members: int = 1,
    steps: int = 1000,
    batch: int = 256,
    lr: float = 1e-3,
    seed: int = 0,
) -> Ensemble:
    """Learns from labelled pixels [N, C] and [N]; members differ by their start and their order.

    Rows may be float16. No copy is made of them: they are standardised a batch at a time.
    """
    if len(rows) < 2:
        raise UserError("a head learns from two labelled pixels or more: are all of them ignored?")
    parts = rows.split(CHANNELS, dim=1)
    mean = torch.cat([part.float().mean(0) for part in parts])
    deviation = torch.cat([part.float().std(0) for part in parts]).clamp(min=1e-6)
    heads = [
        _fit_one(make, rows, labels, (mean, deviation), classes, steps, batch, lr, seed * 1000 + n)
        for n in range(members)
    ]
    return Ensemble(heads, mean, deviation).eval()


def _fit_one(
    make: MakeHead,
    rows: Tensor,
    labels: Tensor,
    scale: tuple[Tensor, Tensor],
    classes: int,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = make(rows.shape[1], classes).to(rows.device)
    mean, deviation = scale
    order = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(head.parameters(), lr=lr)
    for _ in range(steps):
        # A batch norm needs two rows; with more than there are, some come twice.
        chosen = torch.randint(len(rows), (max(2, batch),), generator=order).to(rows.device)
        x = (rows[chosen].float() - mean) / deviation
        loss = cross_entropy(head(x), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head
