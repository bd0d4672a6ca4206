"""Floor 2. What a pipeline stage of a language model needs: bytes of state and activations, seconds, recompute options.

Analytic and per die: no model is built. Activations are those that backward reads, in bf16, with sequence parallelism
beside tensor parallelism and attention that stores no score matrix; they follow Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), operator by operator, without dropout masks. Under 1F1B
stage i of p holds min(m, p - i) micro-batches (Narayanan et al., 2021). State is 16 bytes per parameter: bf16 weight
and gradient, fp32 master and two moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.topology.dataflow import Access, best_dataflow
from lightning_tieroffload.topology.mesh import Site

__all__ = ["MODELS", "ModelSpec", "RecomputeOption", "StageNeed", "model_spec", "stage_needs"]

STATE_BYTES_PER_PARAMETER = 16
ACTIVATION_NBYTES = 2
# Fraction of a die's peak rate that matrix products reach; an assumption, the same for all variants of a study.
COMPUTE_FRAC = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Dimensions of a decoder. ``num_experts`` 1 means dense; ``gated`` means three matrices per MLP, not two."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gated: bool = True
    num_experts: int = 1
    num_active_experts: int = 1

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        return 2 * self.hidden * self.hidden + 2 * self.hidden * self.hidden * self.num_kv_heads // self.num_heads

    @property
    def mlp_parameters(self) -> int:
        """Of one layer, all experts."""
        return (3 if self.gated else 2) * self.hidden * self.ffn * self.num_experts

    @property
    def num_parameters(self) -> int:
        per_layer = self.attention_parameters + self.mlp_parameters
        return self.num_layers * per_layer + 2 * self.vocab * self.hidden


# Llama2-30B and the 137 B mixture are named, not specified, by the study that this one follows. The first takes the
# dimensions of the 33 B LLaMA; the second is made up here: 16 experts, 2 active, 136.8 B parameters in all.
MODELS: Mapping[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name="llama2-30b", num_layers=60, hidden=6656, num_heads=52, num_kv_heads=52, ffn=17920, vocab=32000,
            seq=4096,
        ),
        ModelSpec(
            name="llama3-70b", num_layers=80, hidden=8192, num_heads=64, num_kv_heads=8, ffn=28672, vocab=128256,
            seq=4096,
        ),
        ModelSpec(
            name="gpt-175b", num_layers=96, hidden=12288, num_heads=96, num_kv_heads=96, ffn=49152, vocab=50257,
            seq=2048, gated=False,
        ),
        ModelSpec(
            name="moe-137b", num_layers=40, hidden=6144, num_heads=48, num_kv_heads=8, ffn=11264, vocab=32000,
            seq=4096, num_experts=16, num_active_experts=2,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecomputeOption:
    """Recompute one group of operators in every layer of a stage: bytes saved at the peak, seconds added."""

    group: str
    saved_nbytes: int
    extra_s: float


@dataclass(frozen=True, slots=True)
class StageNeed:
    """One pipeline stage on each die of its tensor-parallel group. Seconds are per micro-batch, forward + backward.

    ``activation_nbytes`` is what is held at the peak with nothing recomputed; ``pipe_nbytes`` crosses to the next
    stage per micro-batch and direction; ``dataflows`` is the choice per operator.
    """

    stage: int
    num_layers: int
    num_in_flight: int
    state_nbytes: int
    activation_nbytes: int
    seconds: float
    pipe_nbytes: int
    options: tuple[RecomputeOption, ...]
    dataflows: Mapping[str, Access]

    @property
    def nbytes(self) -> int:
        return self.state_nbytes + self.activation_nbytes


def model_spec(name: str) -> ModelSpec:
    """The model called ``name``; ``ConfigError`` lists those that there are."""
    if name not in MODELS:
        raise ConfigError(f"model={name!r} is not known. Known: {', '.join(MODELS)}.")
    return MODELS[name]


def stage_needs(
    model: ModelSpec,
    *,
    num_stages: int,
    tensor_parallel: int,
    micro_batch: int,
    num_micro_batches: int,
    die: Site,
    link_bytes_per_s: float,
) -> list[StageNeed]:
    """What each of ``num_stages`` stages needs on each die, ``tensor_parallel`` dies to a stage.

    ``die`` gives compute rate, DRAM rate and SRAM (all must be known). Raises ``ConfigError`` for a split that does not
    work out.
    """
    if not 1 <= num_stages <= model.num_layers:
        raise ConfigError(f"{num_stages} stages cannot share the {model.num_layers} layers of {model.name}.")
    if model.num_heads % tensor_parallel:
        raise ConfigError(f"tensor_parallel={tensor_parallel} does not divide the {model.num_heads} heads.")
    for key in ("compute_flops_per_s", "dram_bytes_per_s", "sram_nbytes"):
        if not getattr(die, key) > 0:
            raise ConfigError(
                f"site {die.name!r} states no {key}: the study needs compute_tflops, dram_bandwidth, sram."
            )
    tokens = micro_batch * model.seq
    t = tensor_parallel
    hidden, kv_hidden = model.hidden, model.hidden * model.num_kv_heads // model.num_heads
    ffn = -(-model.ffn // t)
    rate = die.compute_flops_per_s * COMPUTE_FRAC
    # Tokens per expert are even on average; a die computes its share of every expert.
    per_expert = -(-tokens * model.num_active_experts // model.num_experts)
    products = {
        "qkv": (1, tokens, hidden, -(-(hidden + 2 * kv_hidden) // t)),
        "projection": (1, tokens, -(-hidden // t), hidden),
        "mlp_up": (model.num_experts, per_expert, hidden, (2 if model.gated else 1) * ffn),
        "mlp_down": (model.num_experts, per_expert, ffn, hidden),
        "head": (1, tokens, hidden, -(-model.vocab // t)),
    }
    flows = {name: best_dataflow(m, k, n, die.sram_nbytes) for name, (_, m, k, n) in products.items()}

    def product_s(name: str) -> float:
        times, m, k, n = products[name]
        return times * max(2.0 * m * k * n / rate, flows[name].nbytes / die.dram_bytes_per_s)

    # Causal scores and their product with the values: half of 4 * tokens * seq * hidden.
    scores_s = 2.0 * tokens * model.seq * hidden / t / rate
    attention_s = product_s("qkv") + product_s("projection") + scores_s
    mlp_s = product_s("mlp_up") + product_s("mlp_down")
    # An all-gather and a reduce-scatter around each of the two groups, forward and again backward.
    collective_s = 8 * (t - 1) / t * ACTIVATION_NBYTES * tokens * hidden / link_bytes_per_s

    kept = 2 * ACTIVATION_NBYTES * tokens * hidden // t
    attention_nbytes = ACTIVATION_NBYTES * tokens * (3 * hidden + 2 * kv_hidden) // t
    routed = tokens * model.num_active_experts
    mlp_nbytes = ACTIVATION_NBYTES * routed * (hidden + (3 if model.gated else 2) * model.ffn) // t
    per_layer = kept + attention_nbytes + mlp_nbytes

    base, spare = divmod(model.num_layers, num_stages)
    needs = []
    for stage in range(num_stages):
        # The odd layers go to the last stages, which hold the fewest micro-batches.
        num_layers = base + (stage >= num_stages - spare)
        in_flight = min(num_micro_batches, num_stages - stage)
        parameters = num_layers * (model.attention_parameters + model.mlp_parameters)
        parameters += model.vocab * model.hidden * ((stage == 0) + (stage == num_stages - 1))
        seconds = num_layers * (3 * (attention_s + mlp_s) + collective_s)
        if stage == num_stages - 1:
            seconds += 3 * product_s("head")
        # One layer's worth is there again while it is recomputed.
        copies = num_layers * in_flight - 1
        options = (
            RecomputeOption("attention", attention_nbytes * copies, num_layers * (attention_s + collective_s / 4)),
            RecomputeOption("mlp", mlp_nbytes * copies, num_layers * (mlp_s + collective_s / 4)),
        )
        needs.append(
            StageNeed(
                stage=stage,
                num_layers=num_layers,
                num_in_flight=in_flight,
                state_nbytes=parameters * STATE_BYTES_PER_PARAMETER // t,
                activation_nbytes=per_layer * num_layers * in_flight,
                seconds=seconds,
                pipe_nbytes=ACTIVATION_NBYTES * tokens * hidden // t,
                options=options,
                dataflows=flows,
            )
        )
    return needs
