"""An ordinary training script of unconditional images with diffusers, as people have it.

It knows nothing of Stillhouse: test_diffusers_script makes the two changes that the guide shows.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_data_dir", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--train_batch_size", type=int, default=32)
    parser.add_argument("--max_train_steps", type=int, default=60)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read_images(folder: Path) -> torch.Tensor:
    """All of them in [-1, 1]."""
    pixels = [np.array(Image.open(file).convert("RGB")) for file in sorted(folder.glob("*.png"))]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 127.5 - 1


def tiny_unet(sample_size: int) -> UNet2DModel:
    return UNet2DModel(
        sample_size=sample_size,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    images = read_images(args.train_data_dir)
    model = tiny_unet(images.shape[-1])
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    data = TensorDataset(images)
    loader = DataLoader(data, args.train_batch_size, shuffle=True, drop_last=True)
    batches = (batch for _ in range(args.max_train_steps) for batch in loader)

    losses = []
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for _, (clean_images,) in zip(range(args.max_train_steps), batches, strict=False):
        noise = torch.randn_like(clean_images)
        timesteps = torch.randint(0, len(noise_scheduler), (len(clean_images),))
        noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
        model_output = model(noisy_images, timesteps).sample
        loss = F.mse_loss(model_output, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not losses:
            step = (clean_images, noisy_images, timesteps, model_output.detach())
            torch.save(step, args.output_dir / "first_step.pt")
        losses.append(loss.item())

    (args.output_dir / "losses.json").write_text(json.dumps(losses))
    DDPMPipeline(model, noise_scheduler).save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
