"""Watching torch modules: real small networks, against activations computed by hand, layer by layer."""

import re
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MethodType

import numpy as np
import pytest

from terrafirma.capture._idle_threads import _pause, end_idle_threads
from terrafirma.capture.torch import TorchNetwork
from terrafirma.errors import InvalidInput

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack  # noqa: E402

nn, F = torch.nn, torch.nn.functional
HOOKS = torch.nn.modules.module


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def watch(module, inputs, layers=None, reduce="none", features=False):
    with TorchNetwork(module).watch(layers, reduce, features=features) as run:
        return run(inputs)


def names(step):
    return [layer.name for layer in step.layers]


def expect_bits(layer, preactivation):
    np.testing.assert_array_equal(layer.bits, (preactivation > 0).flatten(1).numpy())


class Calls(nn.Module):
    """A module that runs a function of itself and x."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(10, 3),
    )


def by_hand(module, x):
    """What goes into each part of a Sequential, in evaluation mode; in-place parts cannot change it."""
    inputs = []
    module.eval()
    with torch.no_grad():
        for part in module:
            inputs.append(x.clone())
            x = part(x.clone())
    return inputs, x


def test_a_cnn_with_relus_in_place():
    module, x = cnn().train(), draw(5, 3, 8, 8)
    step = watch(module, x, ["2", "6"], features=True)
    inputs, outputs = by_hand(module, x)
    assert names(step) == ["2", "6"]
    assert [layer.kind for layer in step.layers] == ["relu", "relu"]
    assert [layer.shape for layer in step.layers] == [(4, 8, 8), (10,)]
    for layer, position in zip(step.layers, (2, 6), strict=True):
        expect_bits(layer, inputs[position])
        np.testing.assert_array_equal(layer.features, inputs[position].relu().flatten(1).numpy())
        assert layer.bits.dtype == np.bool_
        assert layer.features.dtype == np.float32
    np.testing.assert_array_equal(step.outputs, outputs.numpy())
    assert step.outputs.dtype == np.float32


def test_the_last_gate_is_the_default_and_no_features_are_kept_unasked():
    module, x = cnn(), draw(5, 3, 8, 8)
    (layer,) = watch(module, x).layers
    assert layer.name == "6"
    assert layer.features is None
    expect_bits(layer, by_hand(module, x)[0][6])
    (layer,) = watch(module, x, features=True).layers
    np.testing.assert_array_equal(layer.features, by_hand(module, x)[0][6].relu().numpy())


def test_layers_come_in_the_order_in_which_they_ran_whatever_was_asked_first():
    assert names(watch(cnn(), draw(2, 3, 8, 8), ["6", "2"])) == ["2", "6"]
    assert names(watch(cnn(), draw(2, 3, 8, 8), ["*"])) == ["2", "6"]


def test_one_relu_module_used_three_times():
    def forward(self, x):
        return self.c(self.relu(self.b(self.relu(self.a(self.relu(x))))))

    module, x = Calls(forward, relu=nn.ReLU(True), a=nn.Linear(6, 5), b=nn.Linear(5, 4), c=nn.Linear(4, 2)), draw(7, 6)
    with torch.no_grad():
        first = module.a(x.relu())
        second = module.b(first.relu())
    step = watch(module, x.clone(), ["relu"])
    assert names(step) == ["relu#1", "relu#2", "relu#3"]
    for layer, preactivation in zip(step.layers, (x, first, second), strict=True):
        expect_bits(layer, preactivation)
    (layer,) = watch(module, x.clone(), ["relu#2"]).layers
    assert layer.name == "relu#2"
    expect_bits(layer, first)


GATES = {
    "relu": F.relu,
    "torch.relu": torch.relu,
    "method": lambda x: x.relu(),
    "in place": lambda x: x.relu_(),
    "relu inplace": lambda x: F.relu(x, inplace=True),
    "operator": torch.ops.aten.relu,
    "clamp": lambda x: x.clamp(min=0),
    "clamp in place": lambda x: x.clamp_(0.0),
    "clamp_min": lambda x: torch.clamp_min(x, 0),
    "clip": lambda x: torch.clip(x, 0, 1),
    "threshold": lambda x: F.threshold(x, 0.0, 0.0),
    "threshold in place": lambda x: F.threshold_(x, 0.0, 0.0),
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 2.0, inplace=True),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "leaky_relu in place": F.leaky_relu_,
    "rrelu": F.rrelu,
    "elu": F.elu,
    "selu": lambda x: F.selu(x, inplace=True),
    "celu": F.celu,
    "silu": lambda x: F.silu(x, inplace=True),
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "hardswish": F.hardswish,
    "prelu": lambda x: F.prelu(x, torch.full((6,), 0.3)),
    "add_relu": lambda x: torch._VF._add_relu(x, torch.zeros(6)),
}


@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference_mode"])
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_gates_are_seen_however_they_are_called(gate, inference):
    def forward(self, x):
        with torch.inference_mode(inference):
            return self.last(gate(self.first(x)))

    module, x = Calls(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 2)), draw(9, 4)
    with torch.no_grad():
        preactivation = module.first(x)
        result = gate(preactivation.clone())
    (layer,) = watch(module, x, features=True).layers
    assert layer.name == layer.kind
    expect_bits(layer, preactivation)
    np.testing.assert_array_equal(layer.features, result.numpy())


@pytest.mark.parametrize(
    "part",
    [nn.GELU(), nn.SiLU(True), nn.PReLU(), nn.ReLU6(), nn.LeakyReLU(0.2), nn.SELU(), nn.Hardswish(), nn.Mish()],
    ids=str,
)
def test_gate_modules(part):
    module, x = nn.Sequential(nn.Linear(4, 6), part, nn.Linear(6, 2)), draw(9, 4)
    (layer,) = watch(module, x).layers
    assert layer.name == "1"
    expect_bits(layer, by_hand(module, x)[0][1])


@pytest.mark.parametrize("dim", [1, -1])
def test_a_glu_is_gated_by_its_second_half(dim):
    module, x = nn.Sequential(nn.Conv1d(3, 8, 1), nn.GLU(dim)), draw(5, 3, 4)
    (layer,) = watch(module, x, features=True).layers
    preactivation = by_hand(module, x)[0][1]
    half = preactivation[:, 4:] if dim == 1 else preactivation[:, :, 2:]
    assert layer.shape == tuple(half.shape[1:])
    expect_bits(layer, half)
    np.testing.assert_array_equal(layer.features, F.glu(preactivation, dim).flatten(1).numpy())


NO_GATES = {
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "clamp from below 0": lambda x: x.clamp(-1, 1),
    "clamp from above": lambda x: x.clamp(max=1.0),
    "clamp by a tensor": lambda x: x.clamp(min=torch.ones(6)),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "clamped numbers": lambda x: x + torch.arange(6).clamp(min=0),
}


@pytest.mark.parametrize("function", NO_GATES.values(), ids=NO_GATES)
def test_what_is_no_gate(function):
    module = Calls(lambda self, x: function(self.first(x)), first=nn.Linear(4, 6))
    assert TorchNetwork(module).candidates(draw(9, 4)) == []


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_networks_run_fused_gates():
    def forward(self, x):
        x = torch.quantize_per_tensor(self.first(x), 0.05, 100, torch.quint8)
        x = torch.ops.quantized.add_relu(x, x, 0.1, 10)
        return F.relu(x).dequantize()

    module, x = Calls(forward, first=nn.Linear(4, 6)), draw(9, 4)
    step = watch(module, x, ["relu"], features=True)
    assert names(step) == ["relu#1", "relu#2"]
    with torch.no_grad():
        expected = (module.first(x) / 0.05).round() > 0
    for layer in step.layers:
        np.testing.assert_array_equal(layer.bits, expected.numpy())
        np.testing.assert_array_equal(layer.features, step.outputs)


def nested():
    block = Calls(lambda self, x: F.relu(self.fc(x)) + self.relu(x), fc=nn.Linear(4, 4), relu=nn.ReLU())
    plain = Calls(lambda self, x: torch.relu(self.act(F.gelu(self.fc(x)))), fc=nn.Linear(4, 4), act=nn.SiLU())
    return nn.Sequential(OrderedDict(block=block, plain=plain))


def test_names_are_those_of_modules_and_never_clash():
    found = TorchNetwork(nested()).candidates(draw(3, 4))
    assert [(layer.name, layer.kind) for layer in found] == [
        ("block.relu_", "relu"),
        ("block.relu", "relu"),
        ("plain.gelu", "gelu"),
        ("plain.act", "silu"),
        ("plain.relu", "relu"),
    ]
    assert all(layer.shape == (4,) and layer.bits is None and layer.features is None for layer in found)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["block.relu"], ["block.relu"]),
        (["block.*"], ["block.relu_", "block.relu"]),
        (["plain.gelu", "*.act"], ["plain.gelu", "plain.act"]),
        (["plain.relu#1"], ["plain.relu"]),
    ],
)
def test_layers_by_name_and_glob(patterns, expected):
    assert names(watch(nested(), draw(3, 4), patterns)) == expected


@pytest.mark.parametrize(("layers", "comparisons"), [(["plain.act"], 1), (["*"], 5), (["fc"], 1)])
def test_bits_are_computed_of_chosen_layers_only(layers, comparisons):
    counted = []

    def count(mode, operation, types, args=(), kwargs=None):
        counted.append(str(operation))
        return operation(*args, **(kwargs or {}))

    mode = TorchDispatchMode()
    mode.__torch_dispatch__ = MethodType(count, mode)
    module = nn.Sequential(OrderedDict(fc=nn.Linear(4, 4), **nested()._modules))
    with mode:
        watch(module, draw(3, 4), layers)
    assert counted.count("aten.gt.Scalar") == comparisons


def encoder(activation, **settings):
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=activation, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not settings.get("norm_first", False))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoders_with_a_fast_path(activation, norm_first):
    module, x = encoder(activation, norm_first=norm_first).eval(), draw(3, 5, 8)
    with torch.no_grad():
        expected = module(x)
    step = watch(module, x, ["*"])
    assert names(step) == [f"layers.0.{activation}", f"layers.1.{activation}"]
    assert [layer.shape for layer in step.layers] == [(5, 16), (5, 16)]
    np.testing.assert_allclose(step.outputs, expected.numpy(), atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        for layer, part in zip(step.layers, module.layers, strict=True):
            if norm_first:
                x = x + part.self_attn(*[part.norm1(x)] * 3, need_weights=False)[0]
                preactivation = part.linear1(part.norm2(x))
                x = x + part.linear2(part.activation(preactivation))
            else:
                x = part.norm1(x + part.self_attn(x, x, x, need_weights=False)[0])
                preactivation = part.linear1(x)
                x = part.norm2(x + part.linear2(part.activation(preactivation)))
            clear = preactivation.abs().flatten(1).numpy() > 1e-5
            np.testing.assert_array_equal(layer.bits[clear], (preactivation > 0).flatten(1).numpy()[clear])
            assert clear.mean() > 0.99


def test_padding_masks_do_not_bring_the_fast_path_back():
    module, x = encoder("relu").eval(), draw(3, 5, 8)
    mask = torch.arange(5) >= torch.tensor([[5], [4], [2]])
    step = watch(module, {"src": x, "src_key_padding_mask": mask}, ["*"])
    assert len(step.layers) == 2


FUSED = (
    "The network must run its gates one by one. TorchScript or MKLDNN runs some fused with others; hand in the module from "
    "before torch.jit.script or to_mkldnn."
)


@pytest.fixture
def fusing():
    """TorchScript fuses on the CPU, as it does on other devices by default."""
    before = torch._C._jit_can_fuse_on_cpu(), torch._C._jit_texpr_fuser_enabled()
    torch._C._jit_override_can_fuse_on_cpu(True)
    torch._C._jit_set_te_must_use_llvm_cpu(False)
    yield
    torch._C._jit_override_can_fuse_on_cpu(before[0])
    torch._C._jit_set_te_must_use_llvm_cpu(True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_gates_that_torchscript_fuses_are_never_missed(fusing):
    x = draw(9, 4)
    fresh = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.GELU())), nn.ReLU())
    for _ in range(4):  # or else it would fuse from the third time on
        assert names(watch(fresh, x, ["*"])) == ["0.relu", "0.gelu", "1"]
    warm = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.ReLU()))
    with torch.no_grad():
        for _ in range(4):
            warm(x)
    with pytest.raises(InvalidInput, match=re.escape(FUSED)):
        watch(nn.Sequential(warm, nn.ReLU()), x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["encoder", "optimized"])
def test_fused_operations_are_refused(kind):
    if kind == "encoder":
        module, x = torch.jit.script(encoder("relu").eval().layers[0]), draw(3, 5, 8)
    else:
        module = torch.jit.script(
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Hardswish()).eval()
        )
        module, x = torch.jit.optimize_for_inference(module), draw(2, 3, 8, 8)
    with pytest.raises(InvalidInput, match=re.escape(FUSED)):
        watch(module, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("freeze", [False, True])
def test_scripted_modules(freeze):
    body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU()).eval()
    scripted, x = torch.jit.script(body), draw(9, 4)
    if freeze:
        scripted = torch.jit.freeze(scripted)
    for _ in range(3):  # after which TorchScript would run what it has optimized
        scripted(x)
    inputs, _ = by_hand(body, x)
    step = watch(scripted, x, ["*"])
    assert names(step) == ["relu#1", "relu#2"]
    expect_bits(step.layers[0], inputs[1])
    expect_bits(step.layers[1], inputs[3])
    assert TorchNetwork(scripted).name == "Sequential"
    step = watch(nn.Sequential(OrderedDict(body=scripted, head=nn.Linear(5, 2))), x)
    assert names(step) == ["body#2" if freeze else "body.relu#2"]  # a frozen module has no parts


def test_traced_and_compiled_modules_are_seen_as_they_were_written():
    body, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)), draw(9, 4)
    compiled = torch.compile(body, backend="eager")
    outer = nn.Sequential(OrderedDict(body=compiled, head=nn.ReLU()))
    for module, name in ((compiled, "1"), (outer, "body.1")):
        (layer,) = watch(module, x, [name]).layers
        assert layer.name == name
        expect_bits(layer, by_hand(body, x)[0][1])
    assert TorchNetwork(compiled).fingerprint() == TorchNetwork(body).fingerprint()
    assert names(watch(outer, x, ["body"])) == ["body"]
    compiled(x)
    assert names(watch(compiled, x, ["*"])) == ["1"]


def test_a_branch_that_depends_on_the_data():
    def forward(self, x):
        return self.deep(x) if x.mean() > 0 else self.last(x)

    module = Calls(forward, deep=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU()), last=nn.ReLU())
    with TorchNetwork(module).watch(None) as run:
        assert names(run(torch.ones(2, 4))) == ["deep.3"]
        assert names(run(-torch.ones(2, 4))) == ["last"]
    with TorchNetwork(module).watch(["deep.1"]) as run:
        run(torch.ones(2, 4))
        with pytest.raises(
            InvalidInput, match="^layers must name layers that run. Got 'deep.1', a module that gave nothing"
        ):
            run(-torch.ones(2, 4))


MAPS = {
    "none": lambda x: (x > 0).flatten(1),
    "any": lambda x: (x > 0).flatten(2).any(2),
    "mean": lambda x: x.flatten(2).mean(2) > 0,
}


@pytest.mark.parametrize("reduce", MAPS)
def test_maps_of_convolutions_are_reduced_by_channel(reduce):
    module, x = cnn(), draw(5, 3, 8, 8)
    first, last = watch(module, x, ["2", "6"], reduce, features=True).layers
    inputs, _ = by_hand(module, x)
    np.testing.assert_array_equal(first.bits, MAPS[reduce](inputs[2]).numpy())
    assert first.shape == (4, 8, 8)
    features = inputs[2].relu().flatten(1) if reduce == "none" else inputs[2].relu().mean((2, 3))
    np.testing.assert_allclose(first.features, features.numpy(), rtol=1e-6)
    expect_bits(last, inputs[6])


@pytest.mark.parametrize("reduce", MAPS)
def test_maps_of_matrix_products_have_channels_last(reduce):
    module, x = nn.Sequential(nn.Linear(4, 6), nn.GELU()), draw(5, 3, 4)
    (layer,) = watch(module, x, None, reduce).layers
    with torch.no_grad():
        preactivation = module[0](x)
    channels_first = preactivation if reduce == "none" else preactivation.movedim(-1, 1)
    np.testing.assert_array_equal(layer.bits, MAPS[reduce](channels_first).numpy())
    assert layer.shape == (3, 6)


def test_channels_are_found_where_networks_mix_convolutions_and_products():
    def convnext(self, x):
        return F.gelu(self.fc(self.conv(x).permute(0, 2, 3, 1)) - 0.4)

    def excited(self, x):
        x = self.conv(x)
        return F.relu(x * self.fc(x.mean((2, 3)))[:, :, None, None] - 0.1)

    x = draw(5, 4, 3, 4)
    for forward, channels in ((convnext, -1), (excited, 1)):
        module = Calls(forward, conv=nn.Conv2d(4, 4, 1), fc=nn.Linear(4, 4))
        flat, reduced = watch(module, x).layers[0], watch(module, x, None, "any").layers[0]
        bits = flat.bits.reshape(5, *flat.shape)
        np.testing.assert_array_equal(reduced.bits, np.moveaxis(bits, channels, 1).reshape(5, 4, -1).any(2))
        assert 0.2 < reduced.bits.mean() < 0.8


def test_a_mean_is_not_lost_to_half_precision():
    """Its value, 6e-8 / 64, has no place among the numbers of 16 bits."""
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()).half()
    with torch.no_grad():
        module[0].weight.fill_(1)
        module[0].bias.fill_(0)
    x = torch.zeros(1, 1, 8, 8)
    x[0, 0, 0, 0] = 2.0**-24
    assert watch(module, x, None, "mean").layers[0].bits.all()


def test_a_module_that_is_no_gate_gives_the_sign_of_its_output():
    class Homemade(nn.Module):
        def forward(self, x):
            return x * (x > 0)

    act = Homemade()
    module, x = (
        nn.Sequential(OrderedDict(fc=nn.Linear(4, 6), act=act, last=nn.Linear(6, 6), again=nn.ReLU())),
        draw(9, 4),
    )
    inputs, outputs = by_hand(module, x)
    step = watch(module, x, ["fc", "act", "again"], features=True)
    assert [(layer.name, layer.kind) for layer in step.layers] == [
        ("fc", "output"),
        ("act", "output"),
        ("again", "relu"),
    ]
    for layer, output in zip(step.layers, [inputs[1], inputs[2], outputs], strict=True):
        expect_bits(layer, output)
        np.testing.assert_array_equal(layer.features, output.numpy())
    assert names(watch(module, x, ["*"])) == ["again"]  # globs are for gates


def test_a_module_that_gives_a_tuple_may_be_named():
    module, x = Calls(lambda self, x: self.lstm(x)[0][:, -1], lstm=nn.LSTM(4, 6, batch_first=True)), draw(5, 3, 4)
    (layer,) = watch(module, x, ["lstm"]).layers
    assert (layer.name, layer.kind, layer.shape) == ("lstm", "output", (3, 6))
    with torch.no_grad():
        expect_bits(layer, module.lstm(x)[0])


class Dictionary(OrderedDict):
    """As the outputs of transformers."""


OUTPUTS = {
    "tuple": lambda a, b: (a.sum(), torch.arange(5), b, a),
    "list": lambda a, b: [None, b],
    "logits": lambda a, b: Dictionary(loss=a.mean(), hidden=a, logits=b),
    "dict": lambda a, b: {"loss": a.mean(), "ids": torch.arange(5), "scores": b, "hidden": a},
}


@pytest.mark.parametrize("make", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_in_tuples_and_dicts(make):
    def forward(self, x):
        hidden = self.first(x).relu()
        return make(hidden, self.last(hidden))

    module, x = Calls(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 3)), draw(5, 4)
    with torch.no_grad():
        expected = module.last(module.first(x).relu())
    np.testing.assert_array_equal(watch(module, x).outputs, expected.numpy())


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (lambda x: x.relu().sum(), "Tensor ()"),
        (lambda x: x.relu()[:2], "Tensor (2, 4)"),
        (lambda x: (x.relu()[:2], 1.0), "tuple of Tensor (2, 4), float"),
        (lambda x: {"loss": x.relu().mean()}, "dict of loss: Tensor ()"),
        (lambda x: [x.relu()][1:], "list of nothing"),
        (lambda x: str(x.relu()), "str"),
    ],
)
def test_outputs_without_one_row_for_each_sample(function, shown):
    sentence = (
        "The network must give a tensor with one row for each of the 5 samples, alone or in a tuple or a dict. "
        f"Got {shown}; wrap the network in a module that gives its logits."
    )
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        watch(Calls(lambda self, x: function(x)), draw(5, 4))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_precisions(dtype):
    dtype = getattr(torch, dtype)
    module, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).to(dtype), draw(9, 4)
    inputs, outputs = by_hand(module, x.to(dtype))
    for given in (x, x.double(), x.numpy(), x.double().numpy()):
        step = watch(module, given, features=True)
        expect_bits(step.layers[0], inputs[1])
        assert step.outputs.dtype == (np.float64 if dtype == torch.float64 else np.float32)
        np.testing.assert_array_equal(step.outputs, outputs.to(torch.float64).numpy())
        np.testing.assert_array_equal(step.layers[0].features, inputs[1].relu().float().numpy())


def test_autocast_is_left_to_the_user():
    module, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU()), draw(9, 4)
    with torch.autocast("cpu", torch.bfloat16):
        step = watch(module, x)
        assert torch.is_autocast_enabled("cpu")
    np.testing.assert_array_equal(step.outputs, by_hand(module.bfloat16(), x.bfloat16())[1].float().numpy())


def test_inputs_may_be_positional_or_named():
    def forward(self, ids, mask=None, scale=1.0):
        return self.fc(self.embedding(ids) * mask[..., None]).relu().sum(1) * scale

    module = Calls(forward, embedding=nn.Embedding(10, 4), fc=nn.Linear(4, 3))
    ids, mask = np.arange(6).reshape(2, 3), np.ones((2, 3))
    expected = watch(module, {"ids": ids, "mask": mask, "scale": 2.0})
    assert expected.layers[0].bits.shape == (2, 9)
    for inputs in (
        (ids, mask, 2.0),
        [torch.tensor(ids), torch.tensor(mask), 2.0],
        Dictionary(ids=ids, mask=mask, scale=2.0),
    ):
        step = watch(module, inputs)
        np.testing.assert_array_equal(step.outputs, expected.outputs)
        np.testing.assert_array_equal(step.layers[0].bits, expected.layers[0].bits)


def test_arrays_of_the_user_are_not_written_to():
    module, x = nn.Sequential(nn.ReLU(inplace=True)), -np.ones((3, 4), np.float32)
    x.flags.writeable = False
    step = watch(module, x[::-1])
    assert not step.layers[0].bits.any()
    assert (x == -1).all()


@pytest.mark.parametrize(
    ("inputs", "shown"),
    [(3.5, "float"), ([], "list of nothing"), ({"a": "b"}, "dict of a: str"), (torch.tensor(1.0), "Tensor ()")],
)
def test_inputs_without_samples(inputs, shown):
    sentence = f"inputs must be an array or a tensor with samples first, or a tuple or dict with one. Got {shown}."
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        watch(nn.Sequential(nn.ReLU()), inputs)


def test_inputs_that_are_no_numbers():
    with pytest.raises(InvalidInput, match=re.escape("inputs must be numbers. Got an array of <U1; convert it first.")):
        watch(nn.Sequential(nn.ReLU()), np.array(["a"]))


def test_no_samples_and_samples_without_axes():
    module = nn.Sequential(nn.Conv1d(3, 4, 1), nn.ReLU())
    for reduce, units in (("none", 20), ("any", 4), ("mean", 4)):
        step = watch(module, torch.zeros(0, 3, 5), None, reduce)
        assert step.layers[0].bits.shape == (0, units)
        assert step.outputs.shape == (0, 4, 5)
    (layer,) = watch(nn.ReLU(), torch.tensor([1.0, -1.0])).layers
    assert layer.name == "relu"
    assert layer.shape == ()
    np.testing.assert_array_equal(layer.bits, [[True], [False]])


def test_layers_must_have_samples_first():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    module = Calls(lambda self, x: self.layer(x.transpose(0, 1)).transpose(0, 1), layer=layer)
    sentence = (
        "A layer must have one row for each of the 3 samples. Got 'layer.relu' of shape (5, 3, 16); name another layer, or "
        "let samples come first (batch_first=True)."
    )
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        watch(module, draw(3, 5, 8))
    sentence = (
        "layers must name gates, or modules that give a tensor with one row for each of the 3 samples. "
        "Got 'layer', which gives Tensor (5, 3, 8); name another."
    )
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        watch(module, draw(3, 5, 8), ["layer"])


def test_names_that_are_wrong():
    with pytest.raises(
        InvalidInput, match=r"Got 'plain.atc'; near it are plain.act, .* \(5 in all: .* lists them\)\.$"
    ):
        watch(nested(), draw(3, 4), ["plain.act", "plain.atc"])
    with pytest.raises(InvalidInput, match=r"Got '\*', and none ran at all\.$"):
        watch(nn.Linear(4, 2), draw(3, 4), ["*"])


def test_a_module_that_never_ran():
    module = Calls(lambda self, x: self.fc(x).relu(), fc=nn.Linear(4, 2), aux=nn.Sequential(nn.ReLU()))
    for name in ("aux", "aux.0"):
        sentence = (
            f"layers must name layers that run. Got {name!r}, a module that gave nothing on these inputs: it never ran, or "
            "runs inside TorchScript, where only gates are seen. The last modules that ran: fc."
        )
        with pytest.raises(InvalidInput, match=re.escape(sentence)):
            watch(module, draw(3, 4), [name])


def test_a_network_without_gates():
    module, x = nn.Sequential(OrderedDict(fc1=nn.Linear(4, 6), act=nn.Tanh(), fc2=nn.Linear(6, 2))), draw(3, 4)
    sentence = (
        "The network must run a gated layer (relu, gelu, ...), unless layers are named. None ran; name a module and the "
        "sign of what it gives is recorded. The last modules that ran: fc1, act, fc2."
    )
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        watch(module, x)
    expect_bits(watch(module, x, ["act"]).layers[0], by_hand(module, x)[0][1])


def test_a_model_must_be_a_module():
    sentence = "model must be a torch.nn.Module. Got function; hand in the module itself."
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        TorchNetwork(lambda x: x)


def traces(module):
    """All that watching might leave behind."""
    hooks = [HOOKS._global_forward_hooks, HOOKS._global_forward_pre_hooks, HOOKS._global_forward_hooks_always_called]
    hooks += [part._forward_hooks for part in module.modules()] + [part._forward_pre_hooks for part in module.modules()]
    return (
        [len(kind) for kind in hooks],
        [part.training for part in module.modules()],
        _len_torch_dispatch_stack(),
        torch.backends.mha.get_fastpath_enabled(),
        torch._C._get_graph_executor_optimize(),
        torch.is_grad_enabled(),
    )


def test_nothing_is_left_behind():
    seen = []

    def forward(self, x):
        seen.append(traces(self))
        if len(seen) == 3:
            raise KeyError("broken")
        return self.body(x)

    module = Calls(forward, body=cnn()).train()
    module.body[1].eval()  # frozen, say
    before = traces(module)
    network = TorchNetwork(module)
    with network.watch(None) as run:
        assert traces(module) == before
        run(draw(2, 3, 8, 8))
        assert traces(module) == before
    assert traces(module) == before
    hooks, modes, depth, fast, optimized, grad = seen[0]
    assert sum(hooks) == sum(before[0]) + 3  # the one that is always called counts twice
    assert not any(modes)
    assert (depth, fast, optimized, grad) == (before[2] + 1, False, False, False)

    network.candidates(draw(2, 3, 8, 8))
    assert traces(module) == before
    with pytest.raises(KeyError, match="broken"), network.watch(["body.2"]) as run:
        run(draw(2, 3, 8, 8))
    assert traces(module) == before
    with pytest.raises(ZeroDivisionError), network.watch(None) as run:
        run(draw(2, 3, 8, 8)).layers[0].shape[0] // 0
    assert traces(module) == before
    with pytest.raises(InvalidInput), network.watch(["typo"]) as run:
        run(draw(2, 3, 8, 8))
    assert traces(module) == before


def test_layers_by_exact_name_cost_nothing_elsewhere():
    """Operations go through the dispatch mode in the parts that are named, and nowhere else."""
    depths = {}

    def forward(self, x):
        depths["before"] = _len_torch_dispatch_stack()
        x = self.act(self.first(x))
        depths["after"] = _len_torch_dispatch_stack()
        return self.block(x)

    def block(self, x):
        depths["inside"] = _len_torch_dispatch_stack()
        return F.relu(self.fc(x))

    module = Calls(forward, first=nn.Linear(4, 6), act=nn.ReLU(), block=Calls(block, fc=nn.Linear(6, 5)))
    x = draw(3, 4)
    whole = watch(module, x, ["*"])
    assert names(whole) == ["act", "block.relu"]
    assert depths == {"before": 1, "inside": 1, "after": 1}
    for layers, expected in ((["block.relu"], (0, 1, 0)), (["act"], (0, 0, 0)), (["act", "block.relu"], (0, 1, 0))):
        step = watch(module, x, layers)
        assert (depths["before"], depths["inside"], depths["after"]) == expected
        assert names(step) == layers
        for layer in step.layers:
            np.testing.assert_array_equal(layer.bits, whole.layers[names(whole).index(layer.name)].bits)


def test_calls_of_other_threads_are_not_seen():
    """The user's own forward passes, on the same module at the same time, are left alone."""
    module, x = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3)), draw(8, 16)
    expected, plain = watch(module, x, ["1"]).layers[0].bits, module(x)
    stop = threading.Event()

    def bare():
        outcomes = []
        while not stop.is_set():
            outcomes.append(torch.equal(module(x), plain))
        return outcomes

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(bare) for _ in range(2)]
        for _ in range(100):
            np.testing.assert_array_equal(watch(module, x, ["1"]).layers[0].bits, expected)
        stop.set()
    assert all(all(other.result()) for other in others)


def test_data_parallel_is_seen_through():
    module = cnn()
    inside, outside = TorchNetwork(module), TorchNetwork(nn.DataParallel(module))
    assert outside.fingerprint() == inside.fingerprint()
    assert outside.name == inside.name


def test_samples_that_come_second_are_noticed():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)  # time first
    message = (
        "Samples must not depend on each other. Got layer 'relu', where the first sample of a batch has another pattern "
        "when it runs alone; let samples come first (batch_first=True)."
    )
    for n in (4, 6):
        with pytest.raises(InvalidInput, match=re.escape(message)):
            watch(encoder, draw(n, 6, 8))
    first = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    assert watch(first, draw(6, 6, 8)).layers[0].bits.shape == (6, 6 * 16)


@pytest.mark.skipif(_pause() is None or torch.get_num_threads() < 2, reason="torch has no idle threads of GNU's OpenMP")
def test_threads_that_torch_leaves_waiting_are_ended():
    """And come back when they are needed."""

    def count():
        return len(list(Path("/proc/self/task").iterdir()))

    x = torch.randn(600, 600)
    expected = x @ x
    before = count()
    end_idle_threads()
    assert count() < before
    assert torch.equal(x @ x, expected)
    assert count() == before
    watch(nn.Sequential(nn.Linear(600, 600), nn.ReLU()), x)
    assert count() < before


def test_an_interrupt_leaves_nothing_behind():
    def forward(self, x):
        raise KeyboardInterrupt

    module = Calls(forward, act=nn.ReLU())
    before = traces(module)
    for layers in (None, ["relu"]):
        with pytest.raises(KeyboardInterrupt):
            watch(module, draw(3, 4), layers)
        assert traces(module) == before


def test_an_exception_that_the_module_catches_does_not_confuse_names():
    def fail(self, x):
        raise KeyError

    def forward(self, x):
        try:
            x = self.broken(x)
        except KeyError:
            x = torch.relu(x)
        return x

    module = Calls(forward, broken=Calls(fail))
    assert names(watch(module, draw(2, 3))) == ["relu"]
    with pytest.raises(InvalidInput, match="Got 'broken', a module that gave nothing"):
        watch(module, draw(2, 3), ["broken"])


def test_a_module_can_be_trained_on_with_what_it_kept_while_it_was_watched():
    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(4)
        return self.fc(x * self.table).relu()

    module = Calls(forward, fc=nn.Linear(4, 2), table=None)
    watch(module, draw(3, 4))
    x = draw(3, 4).requires_grad_()
    module(x).sum().backward()
    assert x.grad.shape == (3, 4)


def test_own_hooks_of_the_user_run():
    module, seen = nn.Sequential(nn.Linear(4, 2), nn.ReLU()), []
    module[0].register_forward_hook(lambda part, args, result: seen.append(1) or result - 100)
    assert not watch(module, draw(3, 4)).layers[0].bits.any()
    assert seen == [1]


def test_fingerprints():
    def weights(seed, dtype=torch.float32):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(dtype)

    first = TorchNetwork(weights(0)).fingerprint()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert TorchNetwork(weights(0).eval()).fingerprint() == first
    other_class, other_names = nn.Module(), nn.Sequential(OrderedDict(a=weights(0)[0], b=weights(0)[1]))
    for name, part in weights(0).named_children():
        other_class.add_module(name, part)
    other_buffer = weights(0)
    other_buffer[1].running_mean += 1
    others = [weights(1), weights(0, torch.bfloat16), weights(0, torch.float16), other_class, other_names, other_buffer]
    for zeros in (torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(1, 3)):
        others.append(nn.Module())
        others[-1].register_buffer("zeros", zeros)
    assert len({first, *(TorchNetwork(module).fingerprint() for module in others)}) == 10


def test_what_a_network_says_of_itself():
    network = TorchNetwork(cnn())
    assert network.name == "Sequential"
    assert network.classes is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("reduce", MAPS)
def test_modules_on_a_device(reduce):
    module, x = cnn().cuda(), draw(5, 3, 8, 8)
    fingerprint = TorchNetwork(module).fingerprint()
    first, last = watch(module, x.numpy(), ["2", "6"], reduce, features=True).layers
    inputs, _ = by_hand(module, x.cuda())
    np.testing.assert_array_equal(first.bits, MAPS[reduce](inputs[2]).cpu().numpy())
    np.testing.assert_array_equal(last.features, inputs[6].relu().cpu().numpy())
    assert TorchNetwork(module.cpu()).fingerprint() == fingerprint
