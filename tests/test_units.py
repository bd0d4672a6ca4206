"""Cutting models into units: every rule of [Note: units], on real model classes and on shapes made to break it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_tieroffload.engine.units import UnitMap, UnitSpec, find_units
from lightning_tieroffload.errors import ConfigError


def names_of(units: UnitMap) -> list[str]:
    return [unit.name for unit in units.units]


def unit(units: UnitMap, name: str) -> UnitSpec:
    return next(unit for unit in units.units if unit.name == name)


def params_of(unit: UnitSpec) -> list[str]:
    return [name for name, _ in unit.params]


def check_whole(model: nn.Module, units: UnitMap) -> None:
    """What holds for every model: each parameter once, in model order, with all of its holders among the owners."""
    order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    listed = [name for u in units.units for name, _ in u.params] + [name for name, _, _ in units.unmanaged]
    assert sorted(listed) == sorted(order)
    assert len({u.name for u in units.units}) == len(units.units)
    for u in units.units:
        assert u.params
        places = [order[name] for name, _ in u.params]
        assert places == sorted(places)
        assert u.nbytes == sum(p.numel() * p.element_size() for _, p in u.params)
        managed = {id(p) for _, p in u.params}
        holders = {id(m) for m in model.modules() for p in m._parameters.values() if id(p) in managed}
        assert holders <= {id(m) for m in u.owners}
        if u.root is not None:
            inside = {id(p) for p in u.root.parameters()}
            assert managed <= inside
    firsts = [order[u.params[0][0]] for u in units.units]
    assert firsts == sorted(firsts)


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 8, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 97, bias=False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def test_gpt2_blocks_and_tied_embedding() -> None:
    model = gpt2()
    units = find_units(model)
    check_whole(model, units)
    assert names_of(units) == ["transformer.wte", "root", "transformer.h.0", "transformer.h.1"]
    tied = unit(units, "transformer.wte")
    assert tied.owners == (model.transformer.wte, model.lm_head)
    assert tied.root is None
    assert params_of(tied) == ["transformer.wte.weight"]
    assert params_of(unit(units, "root")) == [
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    ]
    assert unit(units, "transformer.h.1").root is model.transformer.h[1]
    assert units.unmanaged == ()


@pytest.mark.parametrize("declared", [None, [], ["LlamaDecoderLayer"], {"LlamaDecoderLayer"}, "LlamaDecoderLayer"])
def test_llama_whatever_no_split_modules_is(declared: object) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=500,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    for module in model.modules():
        if hasattr(module, "_no_split_modules"):
            module._no_split_modules = declared
    units = find_units(model)
    check_whole(model, units)
    assert names_of(units) == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "root", "lm_head"]
    assert params_of(unit(units, "root")) == ["model.norm.weight"]


def test_moe_layer_is_one_unit_with_all_experts() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        vocab_size=64,
    )
    model = MixtralForCausalLM(config)
    units = find_units(model)
    check_whole(model, units)
    for i in range(2):
        assert set(params_of(unit(units, f"model.layers.{i}"))) == {
            f"model.layers.{i}.{name}" for name, _ in model.model.layers[i].named_parameters()
        }


def test_mod_15_experts_in_a_module_list_stay_in_their_layer() -> None:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 4)
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    model = nn.Module()
    model.layers = nn.ModuleList(Moe() for _ in range(8))
    units = find_units(model)
    check_whole(model, units)
    assert names_of(units) == [f"layers.{i}" for i in range(8)]


def test_peft_lora_keeps_the_blocks_of_the_wrapped_model() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    units = find_units(model)
    check_whole(model, units)
    block = "base_model.model.transformer.h.0"
    assert {block, "base_model.model.transformer.h.1"} <= set(names_of(units))
    assert f"{block}.attn.c_attn.lora_A.default.weight" in params_of(unit(units, block))


def test_resnet_like_sequential_of_sequentials_gives_blocks() -> None:
    class Residual(nn.Module):
        def __init__(self, width_in: int, width: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(width_in, width, 3)
            self.bn1 = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3)
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1), nn.BatchNorm2d(width))

    def stage(width_in: int, width: int) -> nn.Sequential:
        return nn.Sequential(Residual(width_in, width), Residual(width, width))

    stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(stem, stage(4, 8), stage(8, 16), stage(16, 32), nn.AdaptiveAvgPool2d(1))
    units = find_units(model)
    check_whole(model, units)
    assert names_of(units) == ["0", "1.0", "1.1", "2.0", "2.1", "3.0", "3.1"]


def test_mlp_sequential_makes_each_linear_a_unit_and_the_tiny_last_one_the_rest() -> None:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    units = find_units(model)
    check_whole(model, units)
    assert names_of(units) == ["0", "2", "4", "6", "root"]
    assert unit(units, "root").root is model[8]


def test_encoder_and_decoder_in_one_list_are_entered() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 16)
            self.layers = nn.ModuleList(Block() for _ in range(3))

    model = nn.Module()
    model.coders = nn.ModuleList([Coder(), Coder()])
    units = find_units(model)
    check_whole(model, units)
    assert {f"coders.{i}.layers.{j}" for i in range(2) for j in range(3)} <= set(names_of(units))


def test_two_large_blocks_are_not_torn_apart() -> None:
    units = find_units(Stack(num_blocks=2))
    assert {"blocks.0", "blocks.1"} <= set(names_of(units))


def test_plain_attributes_go_by_owner() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.second = nn.Linear(32, 32)
            self.norm = nn.LayerNorm(32)
            self.gain = nn.Parameter(torch.ones(3))

    model = Plain()
    units = find_units(model)
    check_whole(model, units)
    assert names_of(units) == ["(root)", "first", "second"]
    assert params_of(unit(units, "(root)")) == ["gain", "norm.weight", "norm.bias"]
    assert unit(units, "(root)").owners == (model, model.norm)


def test_many_small_leftovers_do_not_become_the_largest_unit() -> None:
    model = nn.Module()
    model.large = nn.Linear(64, 64)
    for i in range(40):
        setattr(model, f"small{i}", nn.Linear(20, 20))
    units = find_units(model)
    check_whole(model, units)
    assert max(u.nbytes for u in units.units) == unit(units, "large").nbytes


def test_large_model_parameter_is_named_root_in_parentheses() -> None:
    model = Stack()
    model.positions = nn.Parameter(torch.zeros(128, 16))
    units = find_units(model)
    check_whole(model, units)
    own = unit(units, "(root)")
    assert params_of(own) == ["positions"]
    assert own.root is model
    assert params_of(unit(units, "root")) == ["norm.weight", "norm.bias"]


def test_user_module_called_root_does_not_collide() -> None:
    model = Stack()
    model.root = nn.Linear(16, 64)
    units = find_units(model)
    check_whole(model, units)
    assert unit(units, "root").root is model.root


def test_parameter_tied_across_blocks_is_a_unit_of_its_own() -> None:
    model = Stack()
    model.blocks[3].up.weight = model.blocks[1].up.weight
    units = find_units(model)
    check_whole(model, units)
    tied = unit(units, "blocks.1.up")
    assert params_of(tied) == ["blocks.1.up.weight"]
    assert tied.owners == (model.blocks[1].up, model.blocks[3].up)
    assert "blocks.1.up.bias" in params_of(unit(units, "blocks.1"))


def test_large_head_tied_into_a_block_keeps_its_bias_in_its_own_unit() -> None:
    model = Stack()
    model.head = nn.Linear(16, 64)
    model.big = nn.Linear(16, 64)
    model.blocks[2].up.weight = model.head.weight
    model.big.bias = nn.Parameter(torch.zeros(4096))
    model.blocks[0].down.weight = nn.Parameter(model.big.weight.detach().clone().t())
    units = find_units(model)
    check_whole(model, units)
    tied = next(u for u in units.units if "blocks.2.up.weight" in params_of(u))
    assert set(map(id, tied.owners)) == {id(model.blocks[2].up), id(model.head)}
    assert params_of(tied) == ["blocks.2.up.weight"]
    # What else the head owns is too small for a unit once the tied weight is not counted.
    assert "head.bias" in params_of(unit(units, "root"))


def test_tied_inside_one_block_stays_there() -> None:
    model = Stack()
    block = model.blocks[0]
    block.extra = nn.Linear(16, 64)
    block.extra.weight = block.up.weight
    units = find_units(model)
    check_whole(model, units)
    assert "blocks.0.up.weight" in params_of(unit(units, "blocks.0"))


def test_small_tie_within_the_rest_stays_in_the_rest() -> None:
    model = Stack()
    model.second_norm = nn.LayerNorm(16)
    model.second_norm.weight = model.norm.weight
    units = find_units(model)
    check_whole(model, units)
    assert {"norm.weight", "second_norm.bias"} <= set(params_of(unit(units, "root")))


def test_module_shared_by_two_blocks_is_one_unit_with_all_its_parameters() -> None:
    model = Stack()
    shared = nn.Linear(16, 16)
    model.blocks[0].shared = shared
    model.blocks[5].shared = shared
    units = find_units(model)
    check_whole(model, units)
    own = unit(units, "blocks.0.shared")
    assert own.root is shared
    assert params_of(own) == ["blocks.0.shared.weight", "blocks.0.shared.bias"]


def test_lightning_module_that_wraps_a_model() -> None:
    import lightning.pytorch as pl

    class Wrapper(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()
            self.probe = nn.ModuleList(Block(32) for _ in range(2))

    model = Wrapper()
    units = find_units(model)
    check_whole(model, units)
    # The wrapped model names its blocks; the list beside it is found by the other rule.
    assert {"model.transformer.h.0", "model.transformer.h.1", "probe.0", "probe.1"} <= set(names_of(units))


def test_explicit_classes_only() -> None:
    model = Stack()
    units = find_units(model, ["Linear"])
    check_whole(model, units)
    assert {f"blocks.{i}.{name}" for i in range(8) for name in ("up", "down")} | {"head"} <= set(names_of(units))


def test_explicit_classes_outermost_wins() -> None:
    assert "blocks.0" in names_of(find_units(Stack(), ["Linear", "Block"]))


def test_unknown_class_lists_what_there_is_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no module of class 'Blok'.*Did you mean \"Block\".*Block, "):
        find_units(Stack(), ["Blok"])


def test_compiled_block_keeps_its_class_name_and_its_wrapper_is_the_root() -> None:
    model = Stack()
    model.blocks[1] = torch.compile(model.blocks[1])
    units = find_units(model, ["Block"])
    assert next(u for u in units.units if u.name == "blocks.1").root is model.blocks[1]


def test_parameter_list_is_read_by_its_parent() -> None:
    model = Stack()
    model.adapters = nn.ParameterList([nn.Parameter(torch.zeros(64, 16)) for _ in range(2)])
    units = find_units(model)
    check_whole(model, units)
    own = next(u for u in units.units if "adapters.0" in params_of(u))
    assert any(owner is model for owner in own.owners)


def test_attention_is_there_as_a_whole() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4)

    model = Attention()
    units = find_units(model)
    check_whole(model, units)
    assert names_of(units) == ["attention"]


def test_parametrized_weight_is_owned_by_its_parametrization() -> None:
    model = Stack()
    nn.utils.parametrizations.weight_norm(model.head)
    units = find_units(model)
    check_whole(model, units)
    own = next(u for u in units.units if "head.parametrizations.weight.original1" in params_of(u))
    assert any(owner is model.head.parametrizations.weight for owner in own.owners)


def test_what_is_left_alone_and_why() -> None:
    class Quantized(nn.Parameter):
        pass

    model = Stack()
    model.empty = nn.Linear(8, 0)
    model.odd = nn.Module()
    model.odd.expanded = nn.Parameter(torch.zeros(1).expand(4))
    model.odd.strided = nn.Parameter(torch.zeros(8)[::2])
    model.odd.subclass = Quantized(torch.zeros(4))
    model.odd.sparse = nn.Parameter(torch.eye(3).to_sparse())
    model.odd.transposed = nn.Parameter(torch.zeros(3, 4).t())
    model.odd.lazy = nn.LazyLinear(3)
    flat = torch.zeros(8)
    model.odd.left = nn.Parameter(flat[:4])
    model.odd.right = nn.Parameter(flat[4:])
    model.odd.mirrored = nn.Parameter(torch.zeros(5))
    model.odd.register_buffer("mirror", model.odd.mirrored.data)
    units = find_units(model)
    check_whole(model, units)
    reasons = {name.rpartition("odd.")[2]: reason for name, _, reason in units.unmanaged}
    assert set(reasons) == {
        *("empty.weight", "empty.bias", "expanded", "strided", "subclass", "sparse"),
        *("lazy.weight", "lazy.bias", "left", "right", "mirrored"),
    }
    assert "no elements" in reasons["empty.weight"]
    assert "overlap" in reasons["expanded"]
    assert "gaps" in reasons["strided"]
    assert "Quantized" in reasons["subclass"]
    assert "layout" in reasons["sparse"]
    assert "UninitializedParameter" in reasons["lazy.weight"]
    assert "odd.right" in reasons["left"]
    assert "odd.left" in reasons["right"]
    assert "odd.mirror" in reasons["mirrored"]


def test_meta_parameters_do_not_look_shared() -> None:
    with torch.device("meta"):
        model = Stack()
    units = find_units(model)
    check_whole(model, units)
    assert units.unmanaged == ()


def test_model_without_parameters() -> None:
    assert find_units(nn.GELU()).units == ()


def test_single_linear() -> None:
    model = nn.Linear(4, 4)
    assert names_of(find_units(model)) == ["(root)"]


def test_nothing_is_changed() -> None:
    model = Stack()
    before = {name: (p, p.data_ptr(), p._version) for name, p in model.named_parameters()}
    find_units(model)
    assert {name: (p, p.data_ptr(), p._version) for name, p in model.named_parameters()} == before


def random_module(draw: st.DrawFn, depth: int, pool: list[nn.Parameter]) -> nn.Module:
    kind = draw(st.sampled_from(["leaf", "list", "sequential", "custom"] if depth else ["leaf"]))
    if kind == "leaf":
        module: nn.Module = nn.Linear(draw(st.integers(0, 9)), draw(st.integers(1, 9)), bias=draw(st.booleans()))
        if pool and draw(st.integers(0, 3)) == 0:
            module.weight = draw(st.sampled_from(pool))
        pool.append(module.weight)
        return module
    children = [random_module(draw, depth - 1, pool) for _ in range(draw(st.integers(0, 3)))]
    if kind == "custom":
        module = nn.Module()
        for index, child in enumerate(children):
            module.add_module(f"m{index}", child)
        if draw(st.booleans()):
            module.own = nn.Parameter(torch.zeros(draw(st.integers(0, 50))))
        return module
    return nn.ModuleList(children) if kind == "list" else nn.Sequential(*children)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_trees_are_cut_whole(data: st.DataObject) -> None:
    model = data.draw(st.composite(lambda draw: random_module(draw, 4, []))())
    check_whole(model, find_units(model))
