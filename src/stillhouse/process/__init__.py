"""Sigma-space maths: noise levels, predictions, adapters, keyed noise and analytic denoisers."""

from stillhouse.process import levels, predictions
from stillhouse.process.adapters import EDM, VP, Denoiser, Flow, Network, NetworkDenoiser, Scaling
from stillhouse.process.analytic import Gaussian, GaussianField, GaussianMixture
from stillhouse.process.batch import Batch, Condition, Record
from stillhouse.process.betas import alphas_cumprod, betas
from stillhouse.process.levels import SIGMA_CAP
from stillhouse.process.noise import (
    KeyedNoise,
    NoiseSource,
    keyed_normal,
    keyed_uniform,
    noise_source,
    starting_noise,
)
from stillhouse.process.predictions import PREDICTIONS, Prediction
from stillhouse.process.toys import TOYS

__all__ = [
    "EDM",
    "PREDICTIONS",
    "SIGMA_CAP",
    "TOYS",
    "VP",
    "Batch",
    "Condition",
    "Denoiser",
    "Flow",
    "Gaussian",
    "GaussianField",
    "GaussianMixture",
    "KeyedNoise",
    "Network",
    "NetworkDenoiser",
    "NoiseSource",
    "Prediction",
    "Record",
    "Scaling",
    "alphas_cumprod",
    "betas",
    "keyed_normal",
    "keyed_uniform",
    "levels",
    "noise_source",
    "predictions",
    "starting_noise",
]
