"""Distillers: turn one denoiser into a faster one. Tasks that the engine drives.

| task | its student | needs | paper |
|---|---|---|---|
| `SFD` | takes its teacher's walk in few Euler steps | no data | Zhou et al. 2024 |
| with several `timestamps`, `told` | SFD-v: in any of these numbers | | |
| of an `earlier_student` | the second stage: in one evaluation | | |
| `Progressive` | takes two of its teacher's Euler steps in one | no data | Salimans & Ho 2022 |
| `ConsistencyDistillation` | says where its teacher's walk ends | no data | Song et al. 2023 |
| `Matching`, by one of `emd.METHODS` | draws what its teacher does in one step | no data | there |
"""
