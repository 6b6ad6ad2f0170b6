"""What the operations of Dynamo's graphs are, by what they do.

Dynamo hands over torch functions and tensor methods, the latter as strings.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx

from stepfx.patterns.program import is_static, is_tensor, value_of

ATTENTION = frozenset({"scaled_dot_product_attention", "flex_attention"})
MATMULS = frozenset(
    {
        F.linear,
        F.scaled_dot_product_attention,
        torch._C._nn.linear,
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.einsum,
        torch.matmul,
        torch.mm,
        operator.matmul,
        "matmul",
        "bmm",
        "mm",
        "__matmul__",
    }
)
ADDS = frozenset({operator.add, operator.iadd, torch.add, "add", "add_", "__add__"})
ACTIVATIONS = frozenset(
    {"celu", "elu", "gelu", "glu", "hardswish", "leaky_relu", "mish", "relu", "relu_", "relu6"}
    | {"selu", "sigmoid", "silu", "softplus", "tanh"}
)
# Operations that change the layout of a tensor and not its values.
LAYOUT = frozenset(
    {"clone", "contiguous", "expand", "flatten", "getitem", "movedim", "permute", "reshape"}
    | {"squeeze", "swapaxes", "transpose", "unflatten", "unsqueeze", "view"}
)


def name_of(node: fx.Node) -> str:
    """Return the bare name of what an operation calls."""
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def is_matmul(node: fx.Node) -> bool:
    """Tell whether an operation multiplies matrices: linear, attention, convolution."""
    return node.target in MATMULS


def mixes_tokens(node: fx.Node) -> bool:
    """Tell whether an operation multiplies two activations: attention, softmax or linear."""
    if name_of(node) in ATTENTION:
        return True
    if not is_matmul(node):
        return False
    operands = [n for n in node.all_input_nodes if is_tensor(value_of(n))]
    return len(operands) >= 2 and not any(is_static(n) for n in operands)


def activates_tokens(node: fx.Node) -> bool:
    """Tell whether an operation is the non-linearity of an MLP over tokens."""
    value = value_of(node)
    return name_of(node) in ACTIVATIONS and is_tensor(value) and value.dim() >= 3
