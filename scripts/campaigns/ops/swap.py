"""FLA's functions replaced by those of deltaproof.ops, wherever an imported module holds them.

    import fla.models, swap
    swap.swap()  # from here on FLA's layers and models call deltaproof.ops

`tiny_triton()` makes FLA's other kernels run on CPU tensors by Triton's interpreter, for tries
without a device; call it before anything imports FLA."""

import importlib.util
import os
import sys

NAMES = {
    "fla.ops.kda": ("chunk_kda", "fused_recurrent_kda"),
    "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "fla.ops.gdn2": ("chunk_gdn2",),
    "fla.ops.gla": ("chunk_gla",),
    "fla.ops.simple_gla.chunk": ("chunk_simple_gla",),
    "fla.ops.gated_delta_product": ("chunk_gated_delta_product",),
    "fla.ops.generalized_delta_rule.dplr": ("chunk_dplr_delta_rule",),
    "fla.ops.rwkv7": ("chunk_rwkv7",),
    "fla.modules.convolution": ("causal_conv1d",),
}
USERS = ("fla", "test_", "tests", "transformers")


def originals():
    """(FLA's function, its name), those that FLA has."""
    for module, names in NAMES.items():
        held = importlib.import_module(module)
        for name in names:
            yield getattr(held, name), name


def put(replacements):
    """replacements: {id of a function: another}; returns how many names now hold another one."""
    count = 0
    for name, module in list(sys.modules.items()):
        if not name.startswith(USERS):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            other = replacements.get(id(value))
            if other is not None:
                setattr(module, attribute, other)
                count += 1
    return count


def swap(wrap=lambda name, function: function, whose="ours"):
    """Puts wrap(name, function of deltaproof.ops) in place of FLA's; returns {name: (FLA's, ours)},
    which `back` takes. whose: "fla" wraps FLA's own, for comparison."""
    pairs = {}
    for theirs, name in originals():
        function = theirs
        if whose == "ours":
            from deltaproof import ops

            function = getattr(ops, name)
        pairs[name] = theirs, wrap(name, function)
    put({id(theirs): ours for theirs, ours in pairs.values()})
    return pairs


def back(pairs):
    put({id(ours): theirs for theirs, ours in pairs.values()})


class Name:
    """A function of FLA's among a worker's arguments: pickle takes no wrapper."""

    def __init__(self, name):
        self.name = name


class Swapped:
    """A worker's function, which swaps in the process that it is called in."""

    def __init__(self, function, whose="ours"):
        self.function, self.whose = function, whose

    def __call__(self, *args):
        pairs = swap(whose=self.whose)
        return self.function(*(pairs[a.name][1] if isinstance(a, Name) else a for a in args))


class CpuDriver:
    """The driver that FLA and Triton's interpreter ask."""

    class utils:
        @staticmethod
        def get_device_properties(_):
            return {"max_shared_mem": 232448, "multiprocessor_count": 1}

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 0)

    def get_current_device(self):
        return 0

    def get_benchmarker(self):
        return lambda f, *_, **__: (f(), [0.0] * 3)[1]

    def get_empty_cache_for_benchmark(self):
        return None


def tiny_triton():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        import triton
        from triton.runtime import autotuner

        triton.runtime.driver.set_active(CpuDriver())
        make = autotuner.Autotuner.__init__

        def one(self, fn, arg_names, configs, *a, **k):
            make(self, fn, arg_names, configs[:1], *a, **k)

        autotuner.Autotuner.__init__ = one
    import fla.utils
    import torch

    fla.utils.device_torch_lib = torch.cpu
    fla.utils.device = fla.utils.device_name = "cpu"
