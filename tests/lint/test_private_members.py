"""Private members of torch, DeepSpeed and Python on which the package depends: each is present, as the package uses it.

A library may change them in any release. A failure here names the file to change; the tests of that file show how.
"""

import ast
import inspect
import pkgutil
import re
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

import megatron_lite

PACKAGE = Path(megatron_lite.__file__).parent
AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
BACKEND = "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend:C10dRendezvousBackend"
RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
# Private by name only: Python documents them.
DOCUMENTED = {"_asdict", "_replace", "_exit", "_make"}


class Member(NamedTuple):
    """A private member that a file of the package uses."""

    file: str
    owner: str  # module, or module:Class; it defines the member, or assigns it to an object
    name: str
    parameters: str | None = None  # names, of a method or function that the file overrides or calls


MEMBERS = [
    Member("launch/agent.py", AGENT, "_rendezvous", "self worker_group"),
    Member("launch/agent.py", AGENT, "_start_workers", "self worker_group"),
    Member("launch/agent.py", AGENT, "_monitor_workers", "self worker_group"),
    Member("launch/agent.py", AGENT, "_stop_workers", "self worker_group"),
    Member("launch/agent.py", AGENT, "_pcontext"),
    Member("launch/agent.py", AGENT, "_worker_group"),
    Member("launch/agent.py", AGENT, "_remaining_restarts"),
    Member("launch/agent.py", "torch.distributed.elastic.multiprocessing.api:MultiprocessContext", "_pc"),
    Member("launch/pool.py", "torch", "_dynamo"),
    Member("launch/rendezvous.py", RENDEZVOUS, "_NodeDesc", "addr pid local_id"),
    Member("launch/rendezvous.py", RENDEZVOUS, "_RendezvousState", ""),
    Member("launch/rendezvous.py", BACKEND, "_call_store", "self store_op args kwargs"),
    Member("launch/rendezvous.py", BACKEND, "_key"),
    Member("launch/rendezvous.py", BACKEND, "_NULL_SENTINEL"),
    Member("ddp/sharded.py", "torch.nn:Module", "_parameters"),
    Member("parallel/messages.py", "torch.distributed.distributed_c10d", "_get_default_store", ""),
    Member("checkpoint/saver.py", "torch:Tensor", "_version"),
    Member("optim/clip.py", "torch", "_foreach_norm"),
    Member("ddp/local.py", "torch", "_foreach_copy_"),
    Member("ddp/local.py", "torch", "_foreach_add_"),
    Member("ddp/local.py", "torch:Tensor", "_version"),
    Member("model/bf16_attention.py", "torch.cpu", "_is_avx512_bf16_supported"),
    Member("model/bf16_attention.py", "torch:ops.aten", "_scaled_dot_product_flash_attention_for_cpu"),
    Member("model/bf16_attention.py", "torch:ops.aten", "_softmax_backward_data"),
    Member("model/cudnn_attention.py", "torch:ops.aten", "_scaled_dot_product_cudnn_attention"),
    Member("model/cudnn_attention.py", "torch:ops.aten", "_scaled_dot_product_cudnn_attention_backward"),
    Member("parallel/fp32_products.py", "torch:ops.mkldnn", "_linear_pointwise"),
    Member("parallel/recompute.py", "torch.storage:UntypedStorage", "_cdata"),
    Member("observers/flight_recorder.py", "torch", "_C"),
    Member("observers/flight_recorder.py", "torch._C", "_distributed_c10d"),
    Member("plan/communication.py", "torch._ops:OpOverload", "_schema"),
    Member("plan/communication.py", "sys", "_getframe"),
    Member("plan/fake_world.py", "sys", "_getframe"),
    Member("plan/memory.py", "torch.storage:UntypedStorage", "_cdata"),
    Member("optim/mixed_precision.py", "torch.storage:UntypedStorage", "_cdata"),
    Member("plan/memory.py", "torch.distributed.fsdp", "_fully_shard"),
    Member("plan/memory.py", "torch.distributed.fsdp._fully_shard._fsdp_param", "alloc_storage", "tensor"),
    Member("plan/memory.py", "torch.distributed.fsdp._fully_shard._fsdp_param", "free_storage", "tensor"),
    Member(
        "plan/fake_world.py",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
        "_validate_no_meta_params",
        "self",
    ),
    Member("plan/fake_world.py", "torch.distributed.fsdp._fully_shard._fully_shard", "_get_device_from_mesh", "mesh"),
    Member("plan/kernels.py", "torch", "_C"),
    Member("plan/kernels.py", "torch._C", "_current_autograd_node"),
    Member("plan/kernels.py", "torch._ops:OpOverload", "_schema"),
    Member("plan/kernels.py", "sys", "_getframe"),
    Member("training/step.py", "torch", "_foreach_mul_"),
    Member("optim/mixed_precision.py", "torch", "_foreach_mul_"),
    Member("optim/mixed_precision.py", "torch", "_foreach_copy_"),
    Member("engines/deepspeed.py", "torch", "_foreach_mul_"),
    Member("engines/deepspeed_ranges.py", "deepspeed.utils.mixed_precision_linkage", "_hp_mapping"),
    Member(
        "engines/deepspeed.py",
        "deepspeed.runtime.zero.partition_parameters:Init",
        "_convert_to_zero_parameters",
        "self param_list",
    ),
    *(
        Member("engines/deepspeed.py", "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3", name, arguments)
        for name, arguments in {
            "_swappable_optimizer_subgroup": "self sub_group_id",
            "_optimizer_states_and_gradient_swap_in": "self sub_group_id timer_names",
            "_optimizer_states_and_gradient_swap_out": "self sub_group_id timer_names",
        }.items()
    ),
    Member("engines/deepspeed.py", "deepspeed.utils.groups", "_release_process_group_references", "group"),
    Member(
        "engines/deepspeed.py",
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload",
        "_register_deepspeed_module",
        "self module count",
    ),
    *(
        Member("model/attention_parts.py", "torch:ops.aten", f"_scaled_dot_product_flash_attention{name}")
        for name in ("", "_backward", "_for_cpu", "_for_cpu_backward")
    ),
    Member("convert/safe_pickle.py", "torch._utils", "_rebuild_tensor", "storage storage_offset size stride"),
    Member("convert/safe_pickle.py", "pickle", "_Unpickler", "file fix_imports encoding errors buffers"),
]


@cache
def source(owner: type | ModuleType) -> str:
    """The source of a class or module, empty if it is written in C."""
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""


def problem(member: Member) -> str:
    """A message if the member is missing or has other parameters, else an empty text."""
    module, _, name = member.owner.partition(":")
    where = f"megatron_lite/{member.file} uses {member.owner.replace(':', '.')}.{member.name}"
    library = module.partition(".")[0]
    version = getattr(import_module(library), "__version__", "of Python")
    try:
        owner: Any = import_module(module)
        owner = reduce(getattr, name.split("."), owner) if name else owner
    except (ImportError, AttributeError):
        return f"{where}, but {library} {version} has no {member.owner.replace(':', '.')}"
    if not hasattr(owner, member.name):
        owners = owner.__mro__ if isinstance(owner, type) else (owner,)
        assigned = any(re.search(rf"\b\w+\.{member.name}\b.* = ", source(owner)) for owner in owners)
        return "" if assigned else f"{where}, but {library} {version} does not have it"
    if member.parameters is None:
        return ""
    found = " ".join(inspect.signature(getattr(owner, member.name)).parameters)
    return "" if found == member.parameters else f"{where}({member.parameters}), but its parameters are ({found})"


def test_every_private_member_is_as_the_package_uses_it():
    """Otherwise ranks would not start or stop, or weights would be read before they arrive, with a strange error."""
    assert list(filter(None, map(problem, MEMBERS))) == []


def test_the_check_names_the_file_and_a_dropped_member(monkeypatch):
    monkeypatch.delattr(LocalElasticAgent, "_stop_workers")
    monkeypatch.delattr(LocalElasticAgent.__mro__[1], "_stop_workers")
    (message,) = filter(None, map(problem, MEMBERS))
    assert re.fullmatch(
        r"megatron_lite/launch/agent\.py uses torch\.distributed\.\S+\.LocalElasticAgent\._stop_workers, "
        r"but torch 2\.\S+ does not have it",
        message,
    )


def test_the_check_names_changed_parameters(monkeypatch):
    monkeypatch.setattr(LocalElasticAgent, "_stop_workers", lambda self, worker_group, is_restart=False: None)
    (message,) = filter(None, map(problem, MEMBERS))
    assert message.endswith(
        "LocalElasticAgent._stop_workers(self worker_group), but its parameters are (self worker_group is_restart)"
    )


def test_the_check_names_an_attribute_and_a_class_that_are_gone():
    version = f"but torch {torch.__version__}"
    assert problem(Member("a.py", AGENT, "_pool")).endswith(f"Agent._pool, {version} does not have it")
    gone = problem(Member("a.py", "torch.nn:NoModule", "_parameters"))
    assert gone == f"megatron_lite/a.py uses torch.nn.NoModule._parameters, {version} has no torch.nn.NoModule"


def test_a_module_reads_its_parameters_through_the_dictionary():
    """`ddp/sharded.py` waits for a parameter in this read; without it, a forward would use weights in flight."""
    reads = []

    class Recording(dict):
        def __getitem__(self, name: str) -> nn.Parameter:
            reads.append(name)
            return super().__getitem__(name)

    module = nn.Linear(2, 2)
    module._parameters = Recording(module._parameters)
    module(torch.zeros(1, 2))
    assert sorted(reads) == ["bias", "weight"], f"torch {torch.__version__} reads parameters in another way"


def test_the_state_of_the_rendezvous_has_the_fields_of_its_json():
    from megatron_lite.launch import rendezvous

    assert set(vars(rendezvous._RendezvousState())) == set(rendezvous._State.model_fields)


def names_by_file() -> dict[str, set[str]]:
    """Private names by the file that uses them and does not define them: attributes and imports."""
    trees = {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
    defined: set[str] = set()
    used: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if own and isinstance(node.ctx, ast.Store):
                    defined.add(node.attr)
                used.setdefault(file, set()).add(node.attr)
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("megatron_lite"):
                used.setdefault(file, set()).update(alias.name for alias in node.names)
    is_private = re.compile(r"_[a-zA-Z]\w*").fullmatch
    return {file: {name for name in names - defined - DOCUMENTED if is_private(name)} for file, names in used.items()}


def inherited_names() -> dict[str, set[str]]:
    """Private names of a library's class that a subclass in the package overrides, reads or assigns, by file."""
    found: dict[str, set[str]] = {}
    for info in pkgutil.walk_packages([str(PACKAGE)], "megatron_lite."):
        if info.name.endswith("__main__"):
            continue
        module = import_module(info.name)
        for kind in vars(module).values():
            if not isinstance(kind, type) or kind.__module__ != info.name:
                continue
            bases = [base for base in kind.__mro__ if base.__module__.startswith(("torch.", "deepspeed."))]
            theirs = {name for base in bases for name in private_names(source(base))}
            if shared := theirs and theirs & private_names(source(kind)):
                file = Path(inspect.getfile(kind)).relative_to(PACKAGE)
                found.setdefault(str(file), set()).update(shared)
    return found


def private_names(text: str) -> set[str]:
    """Private names in a source that are attributes or methods."""
    return set(re.findall(r"(?:\.|def )(_[a-zA-Z]\w*)", text))


def test_the_list_above_has_every_private_member_of_a_library_that_the_package_uses():
    """A member that is not listed would break with a new torch, far from its cause."""
    listed: dict[str, set[str]] = {}
    for member in MEMBERS:
        listed.setdefault(member.file, set()).add(member.name)
    inherited = inherited_names()
    found = [*names_by_file().items(), *inherited.items()]
    missing = [(file, names - listed.get(file, set())) for file, names in found]
    assert [(file, names) for file, names in missing if names] == []
    assert inherited["launch/agent.py"] >= {"_start_workers", "_pcontext", "_remaining_restarts"}
