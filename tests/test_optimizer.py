"""Each optimizer against its formula in numpy, the schedules, the decay mask, and where the state lives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config import OptimizerConfig
from jaxpar.optimizer import clip_by_global_norm, make_optimizer, make_schedule, matrices, opt_state_specs

NAMES = ("adamw", "lion", "adafactor", "muon", "sgd")
LEARNING_RATE = 0.03
# float64 throughout; what is left is the order of operations.
CLOSE = dict(rtol=1e-11, atol=1e-13)


def section(**keys: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"learning_rate": LEARNING_RATE, "schedule": "constant", **keys})


def make(seed: int, large: bool = False) -> dict:
    """A tree shaped like a model's, sizes all different; `large` has dims that Adafactor factors (≥ 128)."""
    random = np.random.default_rng(seed)
    L, D, F, V = (3, 130, 144, 160) if large else (7, 4, 6, 9)
    return {
        "embedding": {"weight": random.normal(size=(V, D))},
        "blocks": {
            "mlp": {
                "up": {"weight": random.normal(size=(L, D, F)), "bias": random.normal(size=(L, F))},
                "down": {"weight": random.normal(size=(L, F, D))},
            },
            "norm": {"scale": random.normal(size=(L, D))},
        },
        "norm": {"scale": random.normal(size=(D,))},
    }


SPECS = {
    "embedding": {"weight": P(("pipe", "tensor"), None)},
    "blocks": {
        "mlp": {
            "up": {"weight": P("pipe", None, "tensor"), "bias": P("pipe", "tensor")},
            "down": {"weight": P("pipe", "tensor")},
        },
        "norm": {"scale": P("pipe", None)},
    },
    "norm": {"scale": P()},
}


def run(config: OptimizerConfig, params: dict, grads: list[dict]) -> dict:
    tx = make_optimizer(config, make_schedule(config))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params


def expected(params: dict, grads: list[dict], direction: Any, weight_decay: float, clip_norm: float | None) -> dict:
    """Run θ ← θ - η(u + λθ) with one object of `direction` for each leaf, or for each layer of a stacked leaf."""
    new: dict = {}
    norms = [np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grad))) for grad in grads]
    scales = [1.0 if clip_norm is None or norm < clip_norm else clip_norm / norm for norm in norms]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = tuple(key.key for key in path)
        steps = [_at(grad, keys) * s for grad, s in zip(grads, scales, strict=True)]
        stacked = keys[0] == "blocks"
        layers = list(leaf) if stacked else [leaf]
        for index, theta in enumerate(layers):
            rule = direction(keys, theta)
            decay = weight_decay if theta.ndim == 2 else 0.0
            for grad in steps:
                theta = theta - LEARNING_RATE * (rule(grad[index] if stacked else grad, theta) + decay * theta)
            layers[index] = theta
        target = new
        for key in keys[:-1]:
            target = target.setdefault(key, {})
        target[keys[-1]] = np.stack(layers) if stacked else layers[0]
    return new


def _at(tree: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


class Adam:
    def __init__(self, keys, theta, b1=0.8, b2=0.7, eps=1e-3):
        self.m, self.v, self.t, self.b1, self.b2, self.eps = 0.0, 0.0, 0, b1, b2, eps

    def __call__(self, g, theta):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        return (self.m / (1 - self.b1**self.t)) / (np.sqrt(self.v / (1 - self.b2**self.t)) + self.eps)


class Lion:
    def __init__(self, keys, theta):
        self.m = 0.0

    def __call__(self, g, theta):
        u = np.sign(0.8 * self.m + 0.2 * g)
        self.m = 0.7 * self.m + 0.3 * g
        return u


class Momentum:
    def __init__(self, keys, theta):
        self.m = 0.0

    def __call__(self, g, theta):
        self.m = 0.6 * self.m + g
        return self.m


class Adafactor:
    """Algorithm 4 of arXiv:1804.04235 with β2(t) = 1 - t^-0.8, d = 1, no momentum."""

    def __init__(self, keys, theta):
        self.row = self.col = self.v = 0.0
        self.t = 0

    def __call__(self, g, theta):
        self.t += 1
        b2 = 1 - self.t**-0.8
        square = g**2 + 1e-30
        if theta.ndim == 2 and min(theta.shape) >= 128:
            self.row = b2 * self.row + (1 - b2) * square.mean(1)
            self.col = b2 * self.col + (1 - b2) * square.mean(0)
            u = g / np.sqrt(np.outer(self.row, self.col) / self.row.mean())
        else:
            self.v = b2 * self.v + (1 - b2) * square
            u = g / np.sqrt(self.v)
        u = u / max(1.0, np.sqrt((u**2).mean()))
        return u * max(np.sqrt((theta**2).mean()), 1e-3)


class Muon:
    """Nesterov momentum and five quintic Newton-Schulz steps, one matrix at a time; Adam for what is no block matrix.

    The momentum is bias-corrected as in optax, each of its two terms by its own power.
    """

    def __init__(self, keys, theta):
        self.adam = None if keys[0] == "blocks" and theta.ndim == 2 else Adam(keys, theta)
        self.m, self.t = 0.0, 0

    def __call__(self, g, theta):
        if self.adam is not None:
            return self.adam(g, theta)
        self.t += 1
        b = 0.6
        self.m = b * self.m + (1 - b) * g
        x = b * self.m / (1 - b ** (self.t + 1)) + (1 - b) * g / (1 - b**self.t)
        x = x / (np.linalg.norm(x) + 1e-8)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return 0.2 * np.sqrt(max(theta.shape)) * x


RULES = [
    ("adamw", dict(b1=0.8, b2=0.7, eps=1e-3), Adam),
    ("lion", dict(b1=0.8, b2=0.7), Lion),
    ("adafactor", {}, Adafactor),
    ("muon", dict(momentum=0.6, b1=0.8, b2=0.7, eps=1e-3), Muon),
    ("sgd", dict(momentum=0.6), Momentum),
    ("sgd", {}, lambda keys, theta: lambda g, theta: g),
]


@pytest.mark.parametrize(("name", "keys", "rule"), RULES, ids=[f"{n}-{len(k)}" for n, k, _ in RULES])
@pytest.mark.parametrize(("weight_decay", "clip_norm"), [(0.0, None), (0.3, 2.0)])
def test_three_steps_follow_the_formula(name, keys, rule, weight_decay, clip_norm):
    params, grads = make(0, large=name == "adafactor"), [make(seed, large=name == "adafactor") for seed in (1, 2, 3)]
    grads[1] = jax.tree.map(lambda g: g * 1e-2, grads[1])  # its norm is below clip_norm for the small tree
    config = section(name=name, weight_decay=weight_decay, clip_norm=clip_norm, **keys)
    # optax computes Adafactor's t^-0.8 in float32, 6e-8 relative, in an update of at most 3 η
    tolerance = dict(rtol=1e-8, atol=1e-8) if name == "adafactor" else CLOSE
    result = run(config, params, grads)
    for path, want in jax.tree_util.tree_leaves_with_path(expected(params, grads, rule, weight_decay, clip_norm)):
        got = _at(result, tuple(key.key for key in path))
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, **tolerance, err_msg=jax.tree_util.keystr(path))


def test_muon_orthogonalises_each_layer():
    """Scaling one layer's gradient changes no layer's update: nothing is normalised across the stack."""
    params, grad = make(0), make(1)
    config = section(name="muon")
    plain = run(config, params, [grad])["blocks"]["mlp"]["up"]["weight"]
    grad["blocks"]["mlp"]["up"]["weight"][1] *= 1000
    # 1e-6: the +1e-8 in the Frobenius normalisation
    np.testing.assert_allclose(run(config, params, [grad])["blocks"]["mlp"]["up"]["weight"], plain, rtol=1e-6)
    update = (plain - params["blocks"]["mlp"]["up"]["weight"]) / (-LEARNING_RATE * 0.2 * np.sqrt(6))
    values = np.linalg.svd(np.asarray(update), compute_uv=False)  # near 1, as the quintic iteration leaves them
    assert (values > 0.5).all() and (values < 1.3).all()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_norm_may_be_given_by_whoever_sees_all_gradients(name: str):
    """As a parameter server does, which owns a part: it gets the same update as in the whole."""
    params, grads = make(0), make(1)
    config = section(name=name, momentum=0.6, weight_decay=0.3, clip_norm=2.0)
    tx = make_optimizer(config, make_schedule(config))
    whole, _ = tx.update(grads, tx.init(params), params)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    update = jax.jit(lambda *args, norm: tx.update(*args, global_norm=norm))
    parts = {
        key: update({key: grads[key]}, tx.init({key: params[key]}), {key: params[key]}, norm=norm)[0] for key in params
    }
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, **CLOSE), {k: parts[k][k] for k in params}, whole
    )


@pytest.mark.parametrize("norm", [None, 0.5, 3.0, 40.0])
def test_clipping_is_optax_s_with_a_norm_that_may_be_given(norm: float | None):
    grads = jax.tree.map(lambda g: g * 3, make(1))
    clipped, _ = clip_by_global_norm(3.0).update(
        grads, optax.EmptyState(), global_norm=None if norm is None else jnp.asarray(norm)
    )
    if norm is None:
        want, _ = optax.clip_by_global_norm(3.0).update(grads, optax.EmptyState())
    else:
        want = jax.tree.map(lambda g: g * min(1.0, 3.0 / norm), grads)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, **CLOSE), clipped, want)


def test_decay_is_for_matrices_only():
    assert matrices(make(0)) == {
        "embedding": {"weight": True},
        "blocks": {
            "mlp": {"up": {"weight": True, "bias": False}, "down": {"weight": True}},
            "norm": {"scale": False},
        },
        "norm": {"scale": False},
    }


def test_updates_keep_the_dtype():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make(0))
    for name in NAMES:
        tx = make_optimizer(section(name=name, weight_decay=0.1, clip_norm=1.0), lambda count: 0.1)
        updates, _ = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}, name


def rates(steps: range, **keys: Any) -> list[float]:
    schedule = make_schedule(section(**keys))
    return [float(schedule(step)) for step in steps]


def test_warmup_starts_above_zero_and_ends_at_the_peak():
    for name in ("constant", "warmup_cosine", "warmup_linear", "warmup_stable_decay"):
        got = rates(range(5), schedule=name, warmup_steps=4, decay_steps=20)
        np.testing.assert_allclose(got, LEARNING_RATE * np.array([0.2, 0.4, 0.6, 0.8, 1.0]))
        assert rates(range(1), schedule=name, warmup_steps=0, decay_steps=20) == [LEARNING_RATE]


def test_decays():
    keys = dict(warmup_steps=4, decay_steps=20, final_learning_rate_fraction=0.25)
    part = np.arange(17) / 16
    low, fall = 0.25 * LEARNING_RATE, 0.75 * LEARNING_RATE
    cosine = low + fall * (1 + np.cos(np.pi * part)) / 2
    np.testing.assert_allclose(rates(range(4, 21), schedule="warmup_cosine", **keys), cosine)
    np.testing.assert_allclose(rates(range(4, 21), schedule="warmup_linear", **keys), low + fall * (1 - part))
    stable = np.interp(np.arange(4, 21), [15, 20], [LEARNING_RATE, low])
    got = rates(range(4, 21), schedule="warmup_stable_decay", decay_fraction=0.25, **keys)
    np.testing.assert_allclose(got, stable)
    whole = rates(range(4, 21), schedule="warmup_stable_decay", decay_fraction=1.0, **keys)
    np.testing.assert_allclose(whole, low + fall * (1 - part))
    for name in ("warmup_cosine", "warmup_linear", "warmup_stable_decay"):
        np.testing.assert_allclose(rates(range(20, 41, 10), schedule=name, **keys), low)
    assert rates(range(0, 1000, 100), schedule="constant") == [LEARNING_RATE] * 10


def test_the_schedule_counts_applied_steps():
    config = section(name="sgd", schedule="warmup_linear", decay_steps=10, final_learning_rate_fraction=0.0)
    tx = make_optimizer(config, make_schedule(config))
    params = {"norm": {"scale": jnp.ones(2)}}
    state = tx.init(params)
    for step in range(3):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        np.testing.assert_allclose(updates["norm"]["scale"], -LEARNING_RATE * (1 - step / 10))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("large", [False, True])
def test_every_state_leaf_has_a_spec_it_can_use(name: str, large: bool):
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make(0, large))
    config = section(name=name, momentum=0.9, clip_norm=1.0, weight_decay=0.1)
    tx = make_optimizer(config, make_schedule(config))
    shapes = jax.eval_shape(tx.init, params)
    specs = opt_state_specs(tx, params, SPECS)
    flat, treedef = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, P))
    assert treedef == jax.tree.structure(shapes)
    for spec, leaf in zip(flat, jax.tree.leaves(shapes), strict=True):
        assert isinstance(spec, P) and len(spec) <= leaf.ndim


def moments(tree: Any, name: str) -> list[Any]:
    """All `mu`, `nu`, `trace`, ... in an optimizer state, in order."""
    return [value for _, value in optax.tree_utils.tree_get_all_with_path(tree, name)]


def test_moments_live_where_their_parameters_do():
    params = make(0)
    for name, fields in (("adamw", ("mu", "nu")), ("lion", ("mu",)), ("sgd", ("trace",))):
        config = section(name=name, momentum=0.9)
        specs = opt_state_specs(make_optimizer(config, make_schedule(config)), params, SPECS)
        for field in fields:
            assert moments(specs, field) == [SPECS], (name, field)
        assert all(count == P() for count in moments(specs, "count"))
    config = section(name="muon")
    specs = opt_state_specs(make_optimizer(config, make_schedule(config)), params, SPECS)
    adam_mu, muon_mu = moments(specs, "mu")
    assert muon_mu["blocks"]["mlp"]["up"]["weight"] == P("pipe", None, "tensor")
    assert adam_mu["embedding"] == SPECS["embedding"]
    assert adam_mu["blocks"]["mlp"]["up"]["bias"] == P("pipe", "tensor")
    assert jax.tree.leaves(muon_mu["embedding"]) == jax.tree.leaves(adam_mu["blocks"]["mlp"]["down"]) == []


def test_factored_statistics_keep_the_dims_they_share():
    params = make(0, large=True)
    square = np.ones((3, 144, 144))  # which dim is gone cannot be seen
    specs = SPECS | {"blocks": SPECS["blocks"] | {"out": P("pipe", None, "tensor"), "in": P("pipe", "tensor", None)}}
    params["blocks"] |= {"out": square, "in": square}
    config = section(name="adafactor")
    specs = opt_state_specs(make_optimizer(config, make_schedule(config)), params, specs)
    # Of each kind those in the stack and the others, of matrices that are factored and of all else.
    (row, _, rest_row, _), (col, _, rest_col, _) = (moments(specs, name) for name in ("v_row", "v_col"))
    _, v, _, rest_v = moments(specs, "v")
    assert {row["blocks"]["mlp"]["down"]["weight"], col["blocks"]["mlp"]["down"]["weight"]} == {
        P("pipe", None),
        P("pipe", "tensor"),
    }
    for name in ("out", "in"):
        assert row["blocks"][name] == col["blocks"][name] == P("pipe", None)
    assert v["blocks"]["norm"]["scale"] == P("pipe", None) and rest_v["norm"]["scale"] == P()
    assert {rest_row["embedding"]["weight"], rest_col["embedding"]["weight"]} == {P(("pipe", "tensor")), P(None)}


@pytest.mark.parametrize("name", NAMES)
def test_same_update_on_a_mesh(name: str):
    """Sharded state and parameters give what one device gives, and the state stays where its spec says."""
    mesh = jax.make_mesh((2, 2), ("pipe", "tensor"), axis_types=(AxisType.Auto,) * 2)
    random = np.random.default_rng(0)
    params = {
        "embedding": {"weight": random.normal(size=(12, 6))},
        "blocks": {"mlp": {"up": {"weight": random.normal(size=(4, 6, 8)), "bias": random.normal(size=(4, 8))}}},
    }
    specs = {"embedding": SPECS["embedding"], "blocks": {"mlp": {"up": SPECS["blocks"]["mlp"]["up"]}}}
    grads = jax.tree.map(np.cos, params)
    config = section(name=name, momentum=0.9, weight_decay=0.1, clip_norm=1.0)
    tx = make_optimizer(config, make_schedule(config))
    plain, _ = tx.update(grads, tx.init(params), params)

    place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    state_place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), opt_state_specs(tx, params, specs))
    params, grads = jax.device_put((params, grads), (place, place))
    state = jax.jit(tx.init, out_shardings=state_place)(params)
    updates, state = jax.jit(tx.update, out_shardings=(place, state_place))(grads, state, params)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, **CLOSE), updates, plain)


@pytest.mark.parametrize("name", ["constant", "warmup_cosine", "warmup_linear", "warmup_stable_decay"])
@pytest.mark.parametrize("count", [np.int32, jnp.int32])
def test_learning_rates_are_float64_where_the_rest_is(name: str, count: Any):
    """A third of the warm-up of a rate of 0.3 is 0.1 to the last bits; in float32 it is off by 1e-9."""
    section = OptimizerConfig(learning_rate=0.3, schedule=name, warmup_steps=2, decay_steps=9)
    rate = jax.jit(make_schedule(section))(count(0))
    assert rate.dtype == jnp.float64 and abs(rate - 0.1) < 1e-15
