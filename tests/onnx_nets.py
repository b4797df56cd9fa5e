"""Networks for the tests of ONNX: graphs built by hand, and torch networks with what goes into their gates."""

import functools

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ANY = ["n", None]


def model(nodes, inputs=None, outputs=None, weights=None, opset=13, **more):
    """A model of nodes ``(op, inputs, outputs, attributes, name)``, the last two optional; float inputs and outputs."""
    made = []
    for op, given, results, *rest in nodes:
        attributes, name = [*rest, *({}, "")[len(rest) :]]
        made.append(helper.make_node(op, given.split(), results.split(), name=name, **attributes))
    arrays = [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()]
    values = [
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in side.items()]
        for side in (inputs or {"x": (TensorProto.FLOAT, ANY)}, outputs or {"y": (TensorProto.FLOAT, None)})
    ]
    graph = helper.make_graph(made, "graph", *values, arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, **more)


def mlp(rng, widths=(4, 32, 3), opset=13):
    """Linear layers with ReLU between them: tensors h1, r1, h2, ..., y."""
    nodes, weights, x = [], {}, "x"
    for i, (n, m) in enumerate(zip(widths, widths[1:], strict=False), 1):
        weights[f"w{i}"] = rng.normal(size=(n, m)).astype(np.float32)
        weights[f"b{i}"] = rng.normal(size=m).astype(np.float32)
        last = i == len(widths) - 1
        nodes.append(("Gemm", f"{x} w{i} b{i}", "y" if last else f"h{i}"))
        if not last:
            nodes.append(("Relu", f"h{i}", f"r{i}"))
            x = f"r{i}"
    shape = {"x": (TensorProto.FLOAT, ["n", widths[0]])}, {"y": (TensorProto.FLOAT, ["n", widths[-1]])}
    return model(nodes, *shape, weights, opset=opset)


@functools.cache
def torch_net(kind):
    """A module, some inputs, and the modules whose outputs go into its gates: ``cnn``, ``relu`` or ``gelu`` encoder."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    if kind == "cnn":
        net = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(72, 24),
            nn.ReLU(),
            nn.Linear(24, 5),
        )
        net[1].running_mean.uniform_(-0.5, 0.5)
        return net, rng.normal(size=(40, 3, 10, 10)).astype(np.float32), [net[1], net[4], net[7]]
    layer = nn.TransformerEncoderLayer(12, 2, 20, activation=kind, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    net = nn.Sequential(nn.Linear(4, 12), encoder, nn.Flatten(), nn.Linear(60, 3))
    return net, rng.normal(size=(40, 5, 4)).astype(np.float32), [part.linear1 for part in encoder.layers]


@functools.cache
def exported_net(kind):
    """The bytes of ``torch_net`` as an ONNX model."""
    from terrafirma.guard.torch_export import exported

    net, x, _ = torch_net(kind)
    return exported(net, x).SerializeToString()


def loaded(kind):
    return onnx.load_from_string(exported_net(kind))


def pre_activations(kind):
    """What goes into each gate of ``torch_net`` on its inputs, by hooks, and its outputs."""
    import torch

    net, x, parts = torch_net(kind)
    seen = {}
    hooks = [part.register_forward_hook(lambda m, _, out: seen.update({m: out.clone()})) for part in parts]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it hides linear1
    try:
        with torch.no_grad():
            outputs = net.eval()(torch.from_numpy(x)).numpy()
    finally:
        net.train()
        torch.backends.mha.set_fastpath_enabled(fast)
        for hook in hooks:
            hook.remove()
    return [seen[part].numpy() for part in parts], outputs
