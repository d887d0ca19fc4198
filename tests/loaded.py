"""Processes that start at once: as those of warm.py, with this package and its readers loaded too.

For runs of a few steps, which would spend most of their time on that. How the package is loaded is
shown by those that start through warm.py, and by some in tests/resilience that start afresh. What
`datasets` keeps is with the server: it reads from its environment where that is, when it is loaded.
"""

import warm

READERS = (
    *("datasets", "pyarrow.parquet", "scipy.linalg", "tyro", "yaml"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    *("transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert"),
    *("diffusers.models.unets.unet_2d_condition", "diffusers.models.autoencoders.autoencoder_kl"),
    "diffusers.models.transformers.dit_transformer_2d",
    "diffusers.models.transformers.pixart_transformer_2d",
    "diffusers.models.transformers.transformer_sd3",
)
PACKAGE = (
    *("stillhouse.cli.parse", "stillhouse.models.mdt", "stillhouse.models.plane"),
    *("stillhouse.recipes.train.catalogue", "stillhouse.recipes.train.progressive"),
    *("stillhouse.recipes.distill.distilling", "stillhouse.recipes.judge.evaluating"),
    "stillhouse.recipes.sampling",
)


# A fork would lose pyarrow's thread.
_here = warm.Forking(__file__, JE_ARROW_MALLOC_CONF="background_thread:false")
command, run, environment = _here.command, _here.run, _here.environment

if __name__ == "__main__":
    warm.LOADED = (*warm.LOADED, *READERS, *PACKAGE)
    warm.main()
