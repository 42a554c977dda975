"""The networks and losses of the workloads in torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as fn

from tests.benchmarks.workloads import HEADS, LENGTH, WIDTH, Workload


def forward(workload: Workload, x: Any, p: list[Any]) -> Any:
    """The scores of a batch."""
    if workload.kind == "mlp":
        for k in range(0, len(p), 2):
            x = torch.addmm(p[k + 1], x, p[k])
            if k < len(p) - 2:
                x = torch.relu(x)
        return x
    if workload.kind == "lenet":
        x = fn.max_pool2d(torch.relu(fn.conv2d(x, p[0], p[1])), 2)
        x = fn.max_pool2d(torch.relu(fn.conv2d(x, p[2], p[3])), 2)
        return torch.addmm(p[7], torch.relu(torch.addmm(p[5], x.flatten(1), p[4])), p[6])
    rows = x.shape[0]
    for k in (0, 12):
        heads = torch.addmm(p[k + 1], x.reshape(-1, WIDTH), p[k])
        q, key, v = heads.view(rows, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = fn.scaled_dot_product_attention(q, key, v).transpose(1, 2).reshape(-1, WIDTH)
        mixed = torch.addmm(p[k + 3], mixed, p[k + 2]).view(rows, LENGTH, WIDTH)
        x = fn.layer_norm(x + mixed, (WIDTH,), p[k + 4], p[k + 5])
        inner = fn.gelu(torch.addmm(p[k + 7], x.reshape(-1, WIDTH), p[k + 6]))
        inner = torch.addmm(p[k + 9], inner, p[k + 8]).view(rows, LENGTH, WIDTH)
        x = fn.layer_norm(x + inner, (WIDTH,), p[k + 10], p[k + 11])
    return torch.addmm(p[25], x.mean(1), p[24])


def loss_of(workload: Workload, scores: Any, labels: Any, weight: Any) -> Any:
    """The loss of a batch."""
    if workload.loss == "squared_error":
        return fn.mse_loss(scores, labels, reduction="sum")
    if workload.loss == "softmax_cross_entropy":
        return fn.cross_entropy(scores, labels)
    return fn.binary_cross_entropy_with_logits(scores, labels, weight=weight, reduction="sum")
