"""An object that does not fulfil the contract of its kind is told what it lacks, before anything calls it."""

import pytest
from mistaken_plugins import build, plugin, registry

from nanotrain_core.checkpoint.listing import listed
from nanotrain_core.errors import PluginError
from nanotrain_core.hf.open_weights import open_weights


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "model",
            "without layers, vocab_size, max_length, loss_weights, build, loss_counts, flops",
        ),
        ("topology", r"without layout \(see nanotrain_core.api.torch.Topology\)"),
        (
            "monitor",
            r"derive from nanotrain_core.api.torch.Monitor: .* without every_step, .* and 18 more$",
        ),
        (
            "parallel",
            r"from nanotrain_core.api.torch.Parallel: .* apply, op_wrappers, shard, splits_linear$",
        ),
        ("precision", r"from nanotrain_core.api.torch.Precision: .* without parameter_dtype, .* more$"),
        ("kernels", r"from nanotrain_core.api.torch.Kernels: .* without prepare, ops, gemm and 3 more$"),
    ],
)
def test_an_object_that_lacks_part_of_its_contract(tmp_path, kind, text):
    with pytest.raises(PluginError, match=text):
        build(plugin(tmp_path, kind=kind), kind)


def test_a_gradient_sync_of_its_own_says_what_it_needs_of_autograd(tmp_path):
    """``LocalGradients`` says it for all others."""
    methods = "{name: print for name, each in vars(GradientSync).items() if callable(each)}"
    text = (
        "from nanotrain_core.api.torch import GradientSync, Parallel; "
        f"return type('Mine', (Parallel,), {methods})()"
    )
    register = 'Component(name="mine", provides={"gradient_sync"}, config=Config, '
    wanted = (
        r"Mine without needs_gradient_hooks, reads_dtensors \(see nanotrain_core.api.torch.GradientSync\)"
    )
    with pytest.raises(PluginError, match=wanted):
        build(plugin(tmp_path, kind="parallel", build=text, register=register), "parallel")


def test_a_gradient_sync_that_does_not_say_so_is_refused(tmp_path):
    """Gradients were summed by the core, and conformance passed without a call of it."""
    text = (
        "from nanotrain_core.api.torch import LocalGradients, Parallel; "
        "return type('Mine', (LocalGradients, Parallel), {})()"
    )
    with pytest.raises(PluginError, match=r'would never be called.*add provides=\{"gradient_sync"\}'):
        build(plugin(tmp_path, kind="parallel", build=text), "parallel")


def test_an_heir_that_leaves_out_what_has_no_default_is_told_what(tmp_path):
    """It inherits already: the text names the contract, and what is missing."""
    text = "from nanotrain_core.contracts import Precision; return type('Mine', (Precision,), {})()"
    path = plugin(tmp_path, kind="precision", build=text)
    wanted = r"Mine without parameter_dtype, .*loss_scale \(see nanotrain_core.api.torch.Precision\)"
    with pytest.raises(PluginError, match=wanted):
        build(path, "precision")


@pytest.mark.parametrize(
    ("kind", "base", "method", "meant"),
    [
        ("kernels", "Kernels", "op", "ops"),
        ("monitor", "Monitor", "on_before_updates", "on_before_update"),
        ("parallel", "Parallel", "splits_linears", "splits_linear"),
    ],
)
def test_a_method_that_overrides_none_but_looks_like_it_is_told(tmp_path, kind, base, method, meant):
    """A base class has defaults: the run would go on without it."""
    more = "" if kind != "parallel" else ", 'apply': lambda self, part, placements, mesh: part"
    text = (
        f"from nanotrain_core.api.torch import {base}; "
        f"return type('Mine', ({base},), {{'{method}': lambda self, *_: None{more}}})()"
    )
    wanted = rf"Mine has a method {method}, which nobody ever calls, and not {meant} of {base}: rename it"
    with pytest.raises(PluginError, match=wanted):
        build(plugin(tmp_path, kind=kind, build=text), kind)


def test_a_precision_with_pack_in_place_of_packing_is_told(tmp_path):
    """Its weights would have stayed as they were, without a word."""
    text = (
        "import torch; from nanotrain_core.api.torch import NoLossScale, Uniform; "
        "return type('Mine', (Uniform,), {'pack': lambda self, *_: None})(torch.bfloat16, NoLossScale())"
    )
    wanted = "Mine has a method pack, which nobody ever calls, and not packing of Precision: rename it"
    with pytest.raises(PluginError, match=wanted):
        build(plugin(tmp_path, kind="precision", build=text), "precision")


def test_a_misspelt_method_of_a_models_config_is_told(tmp_path):
    text = 'Component(name="mine", config=type("Own", (Config,), {"divisibilitys": print}), '
    members = "'layers vocab_size max_length loss_weights build loss_counts flops'.split()"
    path = plugin(
        tmp_path,
        kind="model",
        build=f"return type('Mine', (), dict.fromkeys({members}))()",
        register=text,
    )
    with pytest.raises(PluginError, match=r"Own has a method divisibilitys, .* not divisibility of ModelCon"):
        build(path, "model")


@pytest.mark.parametrize("kind_of", ["property", "functools.cached_property"])
def test_a_property_may_return_the_method(tmp_path, kind_of):
    """As of an object that the component wraps, which may not exist yet: it is not evaluated."""
    text = (
        "import functools; from nanotrain_core.api.torch import Monitor; "
        f"return type('Mine', (Monitor,), {{'on_step': {kind_of}(lambda self: self.inner.on_step)}})()"
    )
    assert not vars(build(plugin(tmp_path, build=text)))


def test_methods_of_ones_own_are_nobodys_business(tmp_path):
    methods = (
        "{'on_steps_': 1, '_on_steps': lambda self: 1, 'on_step': lambda self, r: None, 'publish': print}"
    )
    text = f"from nanotrain_core.api.torch import Monitor; return type('Mine', (Monitor,), {methods})()"
    assert build(plugin(tmp_path, build=text)).publish is print


def test_data_need_only_their_methods_before_they_are_open(tmp_path):
    with pytest.raises(PluginError) as error:
        build(plugin(tmp_path, kind="data"), "data")
    assert "train_batch" in str(error.value)
    assert "vocab_size" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "methods", "text"),
    [
        (
            "monitor",
            "on_step=lambda self: None",
            r"Mine.on_step\(self\) cannot be called: too many positional arguments \(.*mistake.py:\d+\); "
            r"expected on_step\(self, report\); see docs/kinds/monitor.md$",
        ),
        (
            "monitor",
            "on_recover=lambda self, restore, at_least, x: 0",
            r"\(self, restore, at_least, x\) .*'x'",
        ),
        ("monitor", "on_end=lambda: None", r"Mine.on_end\(\) cannot be called: .*on_end\(self, report\)"),
        ("monitor", "meta={}", r"Mine.meta is a dict; expected meta\(self\); see"),
        ("monitor", "on_step=staticmethod(lambda: 0)", r"Mine.on_step\(\) cannot be called: too many"),
        ("monitor", "on_step=torch.no_grad()(lambda self: 0)", r"Mine.on_step\(self\) cannot be called"),
        (
            "parallel",
            "apply=lambda self, part, mesh: part",
            r"expected apply\(self, part, placements, mesh\)",
        ),
        ("optimizer", "step=lambda self: None", r"'loss_scale' .*expected step\(self, \*, loss_scale=...\)"),
        ("optimizer", "step=lambda self, *, loss_scale: None", r"missing a required .*'loss_scale'"),
        (
            "optimizer",
            "initial_state=lambda self: {}",
            r"expected initial_state\(self, weight\); see .*optimiz",
        ),
        (
            "optimizer",
            "carries=lambda self: False",
            r"Mine.carries is a method; expected a property: write @p",
        ),
    ],
)
def test_a_method_that_the_core_could_not_call(tmp_path, kind, methods, text):
    """It had ended the first call of it, hours later perhaps, with a traceback."""
    base = "MasterOptimizer" if kind == "optimizer" else kind.capitalize()
    made = (
        f"import torch; from nanotrain_core.api.torch import {base} as Base; "
        f"return type('Mine', (Base,), dict({methods}))(*[config][:{kind == 'optimizer'}])"
    )
    path = plugin(tmp_path, build=made, kind=kind)
    with pytest.raises(PluginError, match=text) as error:
        build(path, kind)
    assert f"{kind} 'mine' of plugin 'mistake' (mistake.py sha256-" in str(error.value)


@pytest.mark.parametrize(
    "method",
    [
        "lambda self, *args: None",
        "lambda self, anything, more=1, *, key=None: None",
        "staticmethod(lambda report: None)",
        "classmethod(lambda kind, report: None)",
        "print",
        "functools.partial(lambda key, report: None, 1)",
        "functools.partialmethod(lambda self, report, key: None, key=1)",
        "type('Called', (), {'__call__': lambda self, report: None})()",
        "functools.wraps(lambda self: 0)(lambda self, report: None)",
        "functools.lru_cache(lambda self, report: None)",
        "torch.no_grad()(lambda self, report: None)",
        "unittest.mock.Mock()",
        "operator.itemgetter(1)",
    ],
)
def test_whatever_takes_the_arguments_is_a_method(tmp_path, method):
    made = (
        "import functools, operator, torch, unittest.mock; from nanotrain_core.api.torch import Monitor; "
        f"return type('Mine', (Monitor,), {{'on_step': {method}}})()"
    )
    assert build(plugin(tmp_path, build=made))


def test_a_method_that_an_object_was_given_is_compared_too(tmp_path):
    made = (
        "from nanotrain_core.api.torch import Monitor; found = Monitor(); "
        "found.on_step = lambda self, report: None; return found"
    )
    with pytest.raises(PluginError, match=r"Monitor.on_step\(self, report\) cannot be called: .*'report'"):
        build(plugin(tmp_path, build=made))


def test_an_optional_interface_is_compared_where_it_is_there(tmp_path):
    members = "'open train_batch validation_batch describe encode decode meta load_meta'.split()"
    made = (
        "from unittest.mock import Mock; "
        f"return type('Mine', (), {{**dict.fromkeys({members}, Mock()), 'skip': lambda self: 1}})()"
    )
    with pytest.raises(PluginError, match=r"Mine.skip\(self\) .*expected skip\(self, sequences\); .*data.md"):
        build(plugin(tmp_path, kind="data", build=made), "data")


def test_methods_of_a_models_config_are_compared_when_the_plugin_is_loaded(tmp_path):
    text = 'Component(name="mine", config=type("Own", (Config,), {"canonical": lambda self, key: 1}), '
    (broken,) = registry(plugin(tmp_path, kind="model", register=text)).broken
    assert "model 'mine': Own.canonical(self, key) cannot be called: missing a required" in broken.error


def test_the_loss_scale_of_a_precision_is_part_of_its_contract(tmp_path):
    made = (
        "from nanotrain_core.api.torch import Precision; made = Precision(); "
        "made.parameter_dtype = made.gradient_dtype = None; made.loss_scale = 1.0; return made"
    )
    wanted = r"its loss_scale is a float without value, update, meta, load_meta \(see .*torch.LossScale\)"
    with pytest.raises(PluginError, match=wanted):
        build(plugin(tmp_path, kind="precision", build=made), "precision")


def with_reader(folder, field, code):
    """Return the registry with a checkpoint whose ``field``, ``listing`` or ``weights``, runs ``code``."""
    register = f'Component(name="mine", config=Config, {field}=f"{{__name__}}:found", '
    build = f"return object()\n\ndef found(path):\n    {code}"
    return registry(plugin(folder, kind="checkpoint", build=build, register=register))


LISTS = (
    "from nanotrain_core.api import CheckpointInfo; "
    "return [CheckpointInfo(step=1, path=path, nbytes=1, describe=lambda: {}, verify=list)]"
)
WHOLE = "'meta': {}, 'world_size': 1, 'tensors': {}, 'files': {}"


@pytest.mark.parametrize(
    ("described", "text"),
    [
        ("{**said, 'meta': None}", r"its listing returned no meta; expected meta \(Mapping\), world_size"),
        ("{'meta': {}, 'tensors': {}, 'files': {}}", "no world_size; expected meta"),
        ("{**said, 'tensors': {'w': {'shape': []}}}", "no tensors.w.dtype; expected .* of each tensor dtype"),
        ("{**said, 'files': {'a': '123abc'}}", r"no files.a.sha256; expected .* of each file sha256"),
        ("None", r"describe\(\) returned None; expected Mapping"),
        ("1 / 0", r"describe\(\) of its listing raised ZeroDivisionError: .*mistake.py"),
    ],
)
def test_what_a_listing_says_of_a_checkpoint(tmp_path, described, text):
    """Commands read these keys of every format."""
    code = LISTS.replace("{}", described).replace("return", f"said = {{{WHOLE}}}; return")
    (saved,) = listed(tmp_path, "mine", with_reader(tmp_path, "listing", code))
    with pytest.raises(PluginError, match=f"^checkpoint 'mine' of plugin 'mistake'.*{text}"):
        saved.describe()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("return [{'step': 1}]", "its listing, among its items, returned a dict; expected CheckpointInfo"),
        ("return [][1]", "its listing raised IndexError"),
    ],
)
def test_a_listing_of_something_else(tmp_path, code, text):
    with pytest.raises(PluginError, match=f"^checkpoint 'mine' of plugin 'mistake'.*{text}"):
        listed(tmp_path, "mine", with_reader(tmp_path, "listing", code))


READER = "shapes={}, dtypes={}, read=lambda name, index: None, damage=list"
UNREAD = READER.replace("read=", "get=")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("return {}", "its weights returned a dict; expected SavedWeights"),
        ("return [][1]", "its weights raised IndexError"),
        (
            f"return SavedWeights({{}}, Reader({READER.replace('name, index', 'name')}))",
            r"read\(name\) cannot be called: .*; expected read\(self, name, index\); .*checkpoint.md$",
        ),
        (
            f"return SavedWeights({{}}, Reader({READER.replace(', damage=list', '')}))",
            "the reader of its weights is a SimpleNamespace without damage .see .*WeightReader",
        ),
        (
            f"return SavedWeights({{}}, Reader({READER}), averages=Reader({UNREAD}))",
            "SimpleNamespace without read",
        ),
    ],
)
def test_a_reader_of_weights(tmp_path, code, text):
    needed = (
        "from types import SimpleNamespace as Reader; from nanotrain_core.api.torch import SavedWeights; "
    )
    with pytest.raises(PluginError, match=f"^checkpoint 'mine' of plugin 'mistake'.*{text}"):
        open_weights(tmp_path, with_reader(tmp_path, "weights", needed + code))
