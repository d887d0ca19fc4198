"""Codecs: images to latents and back, as diffusers and its pipelines do it."""

import io
import math

import diffusers
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from metrics.shared import SHARED, weights_folder
from PIL import Image
from small_models import small_unet, unit_noise

from stillhouse.errors import UserError
from stillhouse.models.codecs import AUTOENCODERS, Codec
from stillhouse.process import keyed_normal

MEAN, STD = (-0.4, 0.2, 0.1, 0.9), (2.5, 0.7, 1.6, 0.3)
DC_BLOCKS = ("ResBlock", "ResBlock", "EfficientViTBlock")
BLOCKS = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "norm_num_groups": 4,
}
MADE = {
    "kl": ("AutoencoderKL", {"block_out_channels": (8, 8, 16), **BLOCKS}),
    "kl, shifted": (
        "AutoencoderKL",
        {
            "block_out_channels": (8, 8, 16),
            "latent_channels": 16,
            "scaling_factor": 1.5305,
            "shift_factor": 0.0609,
            **BLOCKS,
        },
    ),
    "kl, with statistics": (
        "AutoencoderKL",
        {
            "block_out_channels": (8, 8, 16),
            "scaling_factor": 0.5,
            "latents_mean": MEAN,
            "latents_std": STD,
            **BLOCKS,
        },
    ),
    "asymmetric": (
        "AsymmetricAutoencoderKL",
        {"down_block_out_channels": (8, 8, 16), "up_block_out_channels": (8, 16, 16), **BLOCKS},
    ),
    "tiny": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (8, 8, 8),
            "decoder_block_out_channels": (8, 8, 8),
            "num_encoder_blocks": (1, 1, 1),
            "num_decoder_blocks": (1, 1, 1),
            "latent_channels": 6,
        },
    ),
    "dc": (
        "AutoencoderDC",
        {
            "latent_channels": 8,
            "attention_head_dim": 8,
            "encoder_block_types": DC_BLOCKS,
            "decoder_block_types": DC_BLOCKS,
            "encoder_block_out_channels": (8, 16, 16),
            "decoder_block_out_channels": (8, 16, 16),
            "encoder_layers_per_block": (1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1),
            "encoder_qkv_multiscales": ((), (), (5,)),
            "decoder_qkv_multiscales": ((), (), (5,)),
            "scaling_factor": 0.41407,
        },
    ),
    "vq": (
        "VQModel",
        {
            "block_out_channels": (8, 8, 16),
            "latent_channels": 3,
            "vq_embed_dim": 5,
            "scaling_factor": 0.5,
            **BLOCKS,
        },
    ),
}
EACH = pytest.mark.parametrize("kind", MADE)


def made(kind, seed=0, **changes):
    name, config = MADE[kind]
    torch.manual_seed(seed)
    return getattr(diffusers, name)(**config | changes).eval()


def codec_of(kind, **changes):
    return Codec(made(kind, **changes)).eval()


def published(name):
    folder = weights_folder() / name
    return Codec(diffusers.AutoencoderTiny.from_pretrained(folder, low_cpu_mem_usage=False)).eval()


def photos(name, count, size=64):
    """The first images of a data set, in [-1, 1]."""
    path = SHARED / "data" / name / "train.parquet"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    rows = next(pq.ParquetFile(path).iter_batches(count, columns=["image"])).to_pylist()
    images = [Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB") for row in rows]
    pixels = np.stack(
        [np.asarray(i.resize((size, size), Image.Resampling.BICUBIC)) for i in images]
    )
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def native(autoencoder, images):
    """What diffusers' own call gives: mean, or latents."""
    with torch.no_grad():
        found = autoencoder.encode(images)
    if hasattr(found, "latent_dist"):
        return found.latent_dist.mode()
    return found.latents if hasattr(found, "latents") else found.latent


def as_pipelines_scale(kind, latents):
    """Written out for each: (z - shift) * scale, or with statistics (z - mean) * scale / std."""
    column = [torch.tensor(values).view(1, -1, 1, 1) for values in (MEAN, STD)]
    return {
        "kl": lambda z: z * 0.18215,
        "kl, shifted": lambda z: (z - 0.0609) * 1.5305,
        "kl, with statistics": lambda z: (z - column[0]) * 0.5 / column[1],
        "asymmetric": lambda z: z * 0.18215,
        "tiny": lambda z: z,
        "dc": lambda z: z * 0.41407,
        "vq": lambda z: z * 0.5,
    }[kind](latents)


# ---------------------------------------------------------------- every class


def test_every_class_is_tried():
    assert {name for name, _ in MADE.values()} == set(AUTOENCODERS)


@EACH
def test_latents_are_those_of_diffusers_scaled_as_its_pipelines_do(kind, tmp_path):
    made(kind).save_pretrained(tmp_path)
    autoencoder = type(made(kind)).from_pretrained(tmp_path, low_cpu_mem_usage=False)
    codec, images = Codec(autoencoder), unit_noise((2, 3, 16, 24)).clamp(-1, 1)
    latents = codec.encode(images)
    expected = as_pipelines_scale(kind, native(autoencoder, images))
    torch.testing.assert_close(latents, expected, rtol=1e-6, atol=1e-6)
    assert latents.shape[1:] == codec.latent_shape((3, 16, 24))
    assert latents.shape[2:] == (16 // codec.downscale, 24 // codec.downscale)
    assert latents.dtype == torch.float32
    assert not latents.requires_grad


@EACH
def test_decoding_undoes_the_scaling(kind):
    autoencoder = made(kind)
    codec, images = Codec(autoencoder), unit_noise((2, 3, 16, 24)).clamp(-1, 1)
    with torch.no_grad():
        expected = autoencoder.decode(native(autoencoder, images)).sample
        decoded = codec.decode(codec.encode(images))
    assert decoded.shape == images.shape
    torch.testing.assert_close(decoded, expected, rtol=1e-5, atol=1e-5)


def test_half_precision_does_not_change_the_scaling():
    codec, half = codec_of("kl, with statistics"), codec_of("kl, with statistics")
    half.to(torch.bfloat16)
    assert torch.equal(half.scale, codec.scale)
    assert torch.equal(half.shift, codec.shift)
    latents = half.encode(torch.zeros(2, 3, 16, 16))
    assert latents.dtype == half.decode(latents).dtype == torch.float32


@EACH
def test_how_a_batch_is_split_changes_no_bit(kind):
    codec, images = codec_of(kind), unit_noise((5, 3, 32, 32)).clamp(-1, 1)
    whole = codec.encode(images, "sample", keys=range(5), seed=3)
    for size in (1, 2, 3):
        rows = torch.arange(5).split(size)
        parts = [codec.encode(images[r], "sample", keys=r, seed=3) for r in rows]
        assert torch.equal(torch.cat(parts), whole), size


def test_published_latents_do_not_follow_the_split_either():
    codec, images = published("taesd3"), photos("birds", 5)
    whole = codec.encode(images)
    for size in (1, 2, 3):
        assert torch.equal(torch.cat([codec.encode(p) for p in images.split(size)]), whole), size


# ---------------------------------------------------------------- samples


def test_samples_are_mean_and_deviation_of_the_encoder_with_keyed_noise():
    kind = "kl, with statistics"
    autoencoder, images = made(kind), unit_noise((3, 3, 16, 16)).clamp(-1, 1)
    codec, keys = Codec(autoencoder), torch.tensor([7, 3, 12])
    with torch.no_grad():
        posterior = autoencoder.encode(images).latent_dist
    noise = keyed_normal((4, 4, 4), keys, seed=5, purpose="latent")
    expected = as_pipelines_scale(kind, posterior.mean + posterior.std * noise)
    drawn = codec.encode(images, "sample", keys=keys, seed=5)
    torch.testing.assert_close(drawn, expected, rtol=1e-5, atol=1e-6)
    mean, std = codec.moments(images)
    assert torch.equal(mean, codec.encode(images))
    torch.testing.assert_close(mean + std * noise, drawn)


def test_samples_need_a_key_each():
    codec, images = codec_of("kl"), torch.zeros(3, 3, 16, 16)
    for keys, said in ((None, "0 keys for 3 images"), ([1, 2], "2 keys for 3 images")):
        with pytest.raises(ValueError, match=said):
            codec.encode(images, "sample", keys=keys)


def test_encoders_of_latents_have_nothing_to_draw():
    codec, images = codec_of("tiny"), unit_noise((2, 3, 16, 16))
    assert codec.moments(images).std is None
    assert torch.equal(codec.encode(images, "sample"), codec.encode(images))


# ---------------------------------------------------------------- published weights

# Mean PSNR and deviation of the latents, as measured beside the weights.
PUBLISHED = {
    ("taesd", "birds"): (20.8, (0.74, 0.78)),
    ("taesd", "emoji"): (23.6, None),
    ("taesd3", "birds"): (25.2, (0.88, 0.97)),
    ("taesd3", "emoji"): (30.1, None),
}


@pytest.mark.parametrize(("name", "data"), PUBLISHED)
def test_published_autoencoders_have_their_known_quality(name, data):
    psnr, spread = PUBLISHED[name, data]
    codec, images = published(name), photos(data, 48)
    latents = codec.encode(images)
    with torch.no_grad():
        decoded = codec.decode(latents).clamp(-1, 1)
    found = -10 * ((decoded - images) / 2).square().flatten(1).mean(1).log10()
    error = float(found.std()) / math.sqrt(len(found))
    assert error < 0.7
    assert abs(float(found.mean()) - psnr) < 3 * error
    if spread is not None:
        low, high = spread
        assert low - 0.02 < float(latents.std()) < high + 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("name", "psnr"), [("taesd", 25.7), ("taesd3", 32.2)])
def test_published_autoencoders_are_better_at_128_pixels(name, psnr):
    codec, images = published(name), photos("birds", 24, 128)
    with torch.no_grad():
        decoded = codec.decode(codec.encode(images)).clamp(-1, 1)
    found = -10 * ((decoded - images) / 2).square().flatten(1).mean(1).log10()
    assert abs(float(found.mean()) - psnr) < 3 * float(found.std()) / math.sqrt(len(found))


def test_tiny_autoencoders_give_latents_as_the_model_takes_them():
    """SD3 is trained on (z - 0.0609) * 1.5305, and TAESD3 was taught that, not z: no shift left."""
    codec = published("taesd3")
    assert (float(codec.scale), float(codec.shift)) == (1, 0)
    latents = codec.encode(photos("birds", 16))
    assert abs(float(latents.mean())) < 0.15
    assert float(latents.std()) > 1.25 / 1.5305  # what unscaled latents of SD3 would not reach


# ---------------------------------------------------------------- tiles


def smooth(height, width):
    """One image of slow waves."""
    y, x = torch.meshgrid(torch.arange(height) / 40, torch.arange(width) / 55, indexing="ij")
    return torch.stack([(y + x).sin(), (y - x).cos(), (0.7 * x).sin()])[None] * 0.8


def apart(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def test_tiles_are_nearer_to_the_whole_than_those_of_diffusers():
    whole, tiled, theirs = published("taesd"), published("taesd"), published("taesd").autoencoder
    tiled.enable_tiling(64, 0.5)
    theirs.enable_tiling()
    theirs.tile_sample_min_size, theirs.tile_latent_min_size = 64, 8
    theirs.tile_overlap_factor = 0.5
    images = smooth(112, 168)
    with torch.no_grad():
        latents = whole.encode(images)
        decoded = whole.decode(latents)
        blended = theirs.encode(images).latents, theirs.decode(latents).sample
        found = tiled.encode(images), tiled.decode(latents)
    assert apart(found[0], latents) < apart(blended[0], latents)
    assert apart(found[1], decoded) < apart(blended[1], decoded)


def test_a_smooth_image_comes_through_tiles_as_well_as_in_one():
    """16 channels, at which diffusers' own tiling of this class ends in an error."""
    whole, tiled = published("taesd3"), published("taesd3").enable_tiling(64)
    images, errors = smooth(112, 168), []
    with torch.no_grad():
        for codec in (whole, tiled):
            decoded = codec.decode(codec.encode(images))
            assert decoded.shape == images.shape
            errors.append(float((decoded - images).square().mean().sqrt()))
    assert errors[1] < errors[0] < 0.05


def test_tiles_are_exact_where_the_network_sees_no_farther_than_their_margin():
    """A small encoder sees 29 pixels around, its decoder no more; the margin is 32."""
    images = unit_noise((1, 3, 192, 320)).clamp(-1, 1)
    whole, tiled = codec_of("tiny"), codec_of("tiny").enable_tiling(160, 0.8)
    assert tiled.tiles == (40, 32)
    with torch.no_grad():
        latents = whole.encode(images)
        torch.testing.assert_close(tiled.encode(images), latents, rtol=1e-5, atol=1e-6)
        decoded = whole.decode(latents)
        torch.testing.assert_close(tiled.decode(latents), decoded, rtol=1e-5, atol=1e-6)


@EACH
def test_no_call_sees_more_than_a_tile(kind):
    codec, seen = codec_of(kind).enable_tiling(32), []
    for part in (codec.autoencoder.encoder, codec.autoencoder.decoder):
        part.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[-2:]))
    images = unit_noise((2, 3, 32, 72)).clamp(-1, 1)
    latents = codec.encode(images)
    assert set(seen) == {(32, 32)}
    assert latents.shape == (2, *codec.latent_shape((3, 32, 72)))
    seen.clear()
    with torch.no_grad():
        assert codec.decode(latents).shape == (2, 3, 32, 72)
    assert set(seen) == {(8, 8)}


@EACH
def test_large_images_are_decoded_in_tiles_although_nobody_asked(kind, monkeypatch):
    """Encoding is left alone: latents would not be those of another way to the same model."""
    monkeypatch.setattr("stillhouse.models.codecs.LARGE", 32)
    codec, seen = codec_of(kind), []
    for part in (codec.autoencoder.encoder, codec.autoencoder.decoder):
        part.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape[-2:])))
    latents = codec.encode(unit_noise((2, 3, 32, 72)).clamp(-1, 1))
    assert set(seen) == {(32, 72)}
    seen.clear()
    with torch.no_grad():
        decoded = codec.decode(latents)
        assert set(seen) == {(8, 8)}
        assert torch.equal(decoded, codec_of(kind).enable_tiling(32).decode(latents))
        seen.clear()
        codec.decode(latents[..., :8])
    assert set(seen) == {(8, 8)}
    assert len(seen) == 1


def test_images_of_a_thousand_pixels_are_decoded_whole():
    codec, seen = codec_of("tiny"), []
    codec._decode = lambda native: seen.append(native.shape[-1]) or native[:, :3].repeat(1, 1, 4, 4)
    codec.decode(torch.zeros(1, 6, 256, 256))
    assert seen == [256]
    assert codec.decode(torch.zeros(1, 6, 256, 257)).shape == (1, 3, 1024, 1028)
    assert seen == [256] * 3


@EACH
def test_images_within_a_tile_are_not_touched(kind):
    images = unit_noise((2, 3, 32, 24)).clamp(-1, 1)
    plain, tiled = codec_of(kind), codec_of(kind).enable_tiling(32)
    assert torch.equal(plain.encode(images), tiled.encode(images))


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.9])
def test_what_is_the_same_everywhere_stays_so_in_tiles(overlap):
    """Weights of the tiles add up to 1, and each tile lands where it was taken from."""
    codec = codec_of("tiny").enable_tiling(16, overlap)
    place = torch.arange(7 * 11).view(1, 1, 7, 11).float()
    torch.testing.assert_close(codec._in_tiles(lambda z: z, place, codec.tiles), place)
    larger = place.repeat_interleave(4, 2).repeat_interleave(4, 3)
    shrunk = codec._in_tiles(lambda x: x[..., ::4, ::4], larger, codec.tiles, inward=4)
    torch.testing.assert_close(shrunk, place)
    grown = codec._in_tiles(
        lambda z: z.repeat_interleave(4, 2).repeat_interleave(4, 3), place, codec.tiles, outward=4
    )
    torch.testing.assert_close(grown, larger)


def test_no_seam_where_tiles_meet():
    """Tiles that disagree by 1 are joined by a slope, not a step."""
    codec, count = codec_of("tiny").enable_tiling(64, 0.5), iter(range(100))
    joined = codec._in_tiles(
        lambda z: torch.full_like(z, next(count) % 2), torch.zeros(1, 1, 16, 40), codec.tiles
    )
    assert 0.1 < float(joined.diff(dim=3).abs().max()) < 0.3


@pytest.mark.parametrize(("side", "overlap"), [(4, 0.25), (64, 1.0), (64, -0.1)])
def test_impossible_tiles_are_refused(side, overlap):
    with pytest.raises(ValueError, match=r"at least 8 pixels and a share within \[0, 1\)"):
        codec_of("tiny").enable_tiling(side, overlap)


# ---------------------------------------------------------------- identity


@EACH
def test_a_digest_survives_a_file_and_nothing_else(kind, tmp_path):
    autoencoder = made(kind)
    autoencoder.save_pretrained(tmp_path)
    digest = Codec(autoencoder).digest
    assert len(digest) == len("sha256:") + 64
    again = type(autoencoder).from_pretrained(tmp_path, low_cpu_mem_usage=False)
    assert Codec(again).digest == digest
    with torch.no_grad():
        next(again.decoder.parameters()).view(-1)[0] += 1e-3
    assert Codec(again).digest != digest
    assert codec_of(kind, seed=1).digest != digest
    assert codec_of(kind).to(torch.bfloat16).digest != digest


def test_a_digest_follows_the_config():
    assert codec_of("kl", scaling_factor=0.3).digest != codec_of("kl").digest


def test_a_digest_is_computed_once_per_precision(monkeypatch):
    codec = codec_of("kl")
    first = codec.digest
    monkeypatch.setattr(codec.autoencoder, "state_dict", None)
    assert codec.digest == first
    monkeypatch.undo()
    assert codec.to(torch.bfloat16).digest == codec_of("kl").to(torch.bfloat16).digest != first


# ---------------------------------------------------------------- refusals


def test_images_that_do_not_divide_are_refused():
    codec = codec_of("kl")
    for shape in ((3, 16, 18), (3, 18, 16), (3, 2, 16), (3, 0, 16)):
        with pytest.raises(UserError, match=r"pixels have no latents: .* multiples of 4, so crop"):
            codec.encode(torch.zeros(1, *shape))
    for shape in ((1, 16, 16), (3, 16), (3, 1, 16, 16)):
        with pytest.raises(UserError, match="takes images of 3 channels, height and width"):
            codec.latent_shape(shape)


def test_other_models_are_no_codecs():
    with pytest.raises(UserError, match=r"a UNet2DModel is no codec; supported: .*AutoencoderKL"):
        Codec(small_unet())
