"""Features: what a diffusion model knows of an image, read from its activations.

After "Not All Diffusion Model Activations Have Been Evaluated as Discriminative Features" (Meng et
al. 2024, arXiv 2410.03558).

From pictures, prompts and a model's name in one step: `stillhouse.recipes.features.Features`.

| module | what it answers |
|---|---|
| `catalogue` | which activations a model has: id, module, stage, resolution, channels |
| `extractor` | what they are for given images: `Extractor(denoiser, ids, t=50).extract(x, ...)` |
| `properties` | how noisy, fine and local each one is, without a task |
| `selection` | which to take: published selections, the paper's rules, a gate by scores |
| `probe` | which to take for labels at hand: forward selection with a linear probe |
| `pca` | fewer channels: principal components of any number of images |
| `matching` | where a point of one image is in another |
| `segmentation` | what each pixel shows, from a few labelled images |
| `store` | features of many images in shards, by any number of processes, resumable |
"""
