"""deltaproof.ops as a solution of the benchmark's task."""

import torch

from deltaproof.ops import chunk_kda


class ModelNew(torch.nn.Module):
    def forward(self, q, k, v, g, beta):
        return chunk_kda(q, k, v, g, beta)[0]
