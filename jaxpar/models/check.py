"""Can a model be trained, and is it what the config says? Asked before anything compiles, and answered by name.

The config's model section describes our own `Transformer`. Of it three keys must agree with any other model:
`num_hidden_layers`, `vocab_size` (with `vocab_multiple`) and `hidden_size`.

Letters: B batch, T tokens, D width, V vocabulary, L layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal

from jaxpar.config import Config, InputError, ModelConfig
from jaxpar.layers import VocabParallelEmbedding
from jaxpar.layers.dropout import example_keys
from jaxpar.layers.layout import STACK
from jaxpar.models.lookups import tables
from jaxpar.models.protocol import cast, layer_maker
from jaxpar.traced import live

MakeModel = Callable[[nnx.Rngs], Any]
Path = tuple[Any, ...]
PROTOCOL = {
    "embed": "token ids to activations",
    STACK: "the layers, made by jaxpar.models.stack",
    "block": "one layer applied to activations",
    "head": "activations to logits",
}


def check_model(config: Config, make_model: MakeModel) -> Any:
    """Make a model of shapes alone, and see that it can be trained. Starts no device of JAX.

    Args:
        config: resolved.
        make_model: builds the model, a `LanguageModel`, from random number streams.

    Returns:
        The model, abstract.

    Raises:
        InputError: it lacks a part of the protocol; it has a variable that is neither learned, as floats in
            `train.param_dtype`, nor constant; `blocks` is no stack; layers, vocabulary or width are not those of the
            config; a block does not keep its input's shape and dtype.
    """
    model = nnx.eval_shape(lambda: make_model(nnx.Rngs(config.train.seed)))
    for name, what in PROTOCOL.items():
        if not hasattr(model, name):
            raise InputError(
                f"The model, {type(model).__name__}, has no `{name}`: {what}. It needs {', '.join(PROTOCOL)}, as "
                f"jaxpar.models.LanguageModel says."
            )
    _check_stack(model, config.model.num_hidden_layers)
    _check_variables(model, config.train.param_dtype)
    _check_sharing(model)
    _check_tables(model, config.model.vocab_size)
    _check_calls(model, config)
    return model


# -------------------------------------------------------------------------------------------------- variables


def _check_variables(model: Any, param_dtype: str) -> None:
    for path, value in nnx.iter_graph(model):
        if isinstance(value, Tracer):
            raise InputError(
                f"{_dotted(path)} is a JAX array that is itself the attribute of a module, where Flax cannot see it "
                f"while a model is traced. Make it an nnx.Variable or a NumPy array if it is constant, an nnx.Param if "
                f"it is learned."
            )
        if isinstance(value, nnx.Param):
            _check_parameter(path, value, param_dtype)
        elif isinstance(value, nnx.Variable) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            raise _changes(path, value)


def _check_parameter(path: Path, param: Any, param_dtype: str) -> None:
    name, dtype = _dotted(path), param.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(
            f"parameter {name} is {_kind(param)}: only real floating-point numbers are learned. Make it an "
            f"nnx.Variable to keep it constant."
        )
    if dtype != jnp.dtype(param_dtype):
        raise InputError(
            f"parameter {name} is {_kind(param)}, train.param_dtype is {param_dtype}. Build the layer with "
            f"param_dtype={param_dtype}, or set train.param_dtype={dtype}."
        )
    layout, dims = param.get_metadata().get("layout", ()), param.ndim - (path[0] == STACK)
    if len(layout) > dims:
        raise InputError(
            f"parameter {name}: the layout {layout} is for {len(layout)} dims, one layer's array has {dims}."
        )


def _changes(path: Path, variable: nnx.Variable) -> InputError:
    instead = "Compute it from the inputs, or make it an nnx.Param to have it learned."
    if isinstance(variable, nnx.BatchStat):
        instead = "Use a norm without statistics over batches, as nnx.RMSNorm or nnx.LayerNorm."
    elif jnp.issubdtype(variable.dtype, jax.dtypes.prng_key) or isinstance(variable, nnx.RngState):
        instead = (
            "Keep no rngs in a model (nnx.Dropout(rate) without rngs); draw from keys_B, of which `block` gets one for "
            "each example: jaxpar.layers.dropout(x, keys_B, rate) does, with the same masks on every layout."
        )
    return InputError(
        f"{_dotted(path)} ({type(variable).__name__}) is state that changes when the model is called. A step "
        f"changes parameters alone, and all other variables are constants. {instead}"
    )


def _check_sharing(model: Any) -> None:
    """A variable at several places is one parameter, but it cannot be in the stack and outside it."""
    stacked = {id(value): path for path, value in nnx.iter_graph(model.blocks) if isinstance(value, nnx.Variable)}
    for name, child in vars(model).items():
        if child is model.blocks or not isinstance(child, nnx.Pytree | nnx.Variable):
            continue
        for path, value in nnx.iter_graph(child):
            if id(value) in stacked:
                raise InputError(
                    f"{_dotted((STACK, *stacked[id(value)]))} and {_dotted((name, *path))} are one variable. Those in "
                    f"`{STACK}` hold a row for each layer, so they cannot be shared with what is outside: make two."
                )


def _check_stack(model: Any, wanted: int) -> None:
    made = f"`{STACK}` must come from jaxpar.models.stack, which gives each array in it a leading dim of layers"
    leaves = nnx.to_flat_state(nnx.state(model.blocks))
    if not any(isinstance(leaf, nnx.Param) for _, leaf in leaves):
        raise InputError(f"`{STACK}` of the model, {type(model).__name__}, has no parameters; {made}.")
    first: dict[int, str] = {}
    for path, leaf in leaves:
        first.setdefault(leaf.shape[0] if leaf.shape else 0, _dotted((STACK, *path)))
    if len(first) > 1 or 0 in first:
        said = ", ".join(f"{name} has {size or 'none'}" for size, name in first.items())
        raise InputError(f"The leading dims in `{STACK}` must be one number of layers, at least 1: {said}; {made}.")
    (layers,) = first
    if layers != wanted:
        raise InputError(
            f"The model has {layers} layers (the leading dim of {first[layers]}), model.num_hidden_layers is {wanted}. "
            f"Set model.num_hidden_layers={layers}, or build a model of {wanted}."
        )


def _check_tables(model: Any, vocab_size: int) -> None:
    for path, module in nnx.iter_graph(model):
        if isinstance(module, VocabParallelEmbedding) and module.vocab_size != vocab_size:
            raise InputError(
                f"{_dotted(path)} is a VocabParallelEmbedding of {module.vocab_size} tokens, model.vocab_size is "
                f"{vocab_size}. Set model.vocab_size={module.vocab_size}, or build it with {vocab_size}."
            )


# -------------------------------------------------------------------------------------------------- calls


def _check_calls(model: Any, config: Config) -> None:
    """Trace what a step calls, in global view, on one microbatch of one replica."""
    compute_dtype = config.train.compute_dtype
    graph, params, constants = nnx.split(model, nnx.Param, ...)
    arrays = jax.eval_shape(lambda params: cast(params, compute_dtype), nnx.to_pure_dict(params)), constants
    rows = config.train.global_batch // (config.mesh.data * config.parallel.microbatches)
    tokens_BT = jax.ShapeDtypeStruct((rows, config.data.sequence_length), jnp.int32)
    keys_B = jax.eval_shape(lambda: example_keys(0, jnp.int32(0), jnp.arange(rows)))

    def embed(tokens_BT: jax.Array, arrays: Any) -> Any:
        whole = nnx.merge(graph, *arrays)
        return _assigning_nothing(lambda: whole.embed(tokens_BT), whole)

    def block(x: jax.Array, keys_B: jax.Array | None, arrays: Any) -> Any:
        whole = nnx.merge(graph, *arrays)
        layer = layer_maker(whole.blocks)(jax.tree.map(lambda p: p[0], arrays[0][STACK]), 0)
        return _assigning_nothing(lambda: whole.block(layer, x, keys_B), whole, layer)

    def head(x: jax.Array, arrays: Any) -> Any:
        whole = nnx.merge(graph, *arrays)
        return _assigning_nothing(lambda: whole.head(x), whole)

    jaxpr, x = jax.make_jaxpr(embed, return_shape=True)(tokens_BT, arrays)
    _check_embedding(x, tables(jaxpr.jaxpr, jaxpr.jaxpr.invars[:1]), config.model)
    for keys in (keys_B, None):  # as in training, and as in evaluation
        program, y = jax.make_jaxpr(block, return_shape=True)(x, keys, arrays)
        _check_block_parameters(program.jaxpr, (x, keys, arrays))
        if _kind(y) != _kind(x):
            raise InputError(
                f"`block` turns {_kind(x)} into {_kind(y)}; it must keep shape and dtype, since the next block gets "
                f"what it returns. Parameters come in train.compute_dtype, {compute_dtype}, constants as they are made."
            )
    _check_logits(jax.eval_shape(head, x, arrays), tokens_BT.shape, config.model)


def _check_block_parameters(program: Jaxpr, args: tuple[Any, Any, Any]) -> None:
    """A block is given one layer's parameters: with what else is learned it would be run on shapes."""
    used = {atom for eqn in live(program) for atom in eqn.invars if not isinstance(atom, Literal)}
    for (path, _), variable in zip(jax.tree_util.tree_leaves_with_path(args), program.invars, strict=True):
        place, *names = (getattr(key, "key", getattr(key, "idx", None)) for key in path)
        if place == 2 and names[0] == 0 and names[1] != STACK and variable in used:
            raise InputError(
                f"`block` uses the parameter {_dotted(tuple(names[1:]))}, which is outside `{STACK}`. It is given one "
                f"layer's parameters and nothing else that is learned: make it a parameter of each layer, or use it in "
                f"`embed` or `head`."
            )


def _check_embedding(x: Any, rows_of_tables: list[int], sizes: ModelConfig) -> None:
    least = min(rows_of_tables, default=sizes.vocab_size)
    if least < sizes.vocab_size:
        raise InputError(
            f"`embed` looks tokens up in a table of {least} rows, model.vocab_size is {sizes.vocab_size}: the other "
            f"tokens would get a wrong row, or NaN. Build it with {sizes.vocab_size}, or set model.vocab_size={least}."
        )
    if not _floats(x):
        raise InputError(f"`embed` gives {_kind(x)}, must give one array of floating-point numbers.")
    if x.ndim == 3 and x.shape[-1] != sizes.hidden_size:
        raise InputError(
            f"`embed` gives {_kind(x)}, a width of {x.shape[-1]}, model.hidden_size is {sizes.hidden_size}. Set "
            f"model.hidden_size={x.shape[-1]}, or build a model of that width."
        )


def _check_logits(logits: Any, shape_BT: tuple[int, ...], sizes: ModelConfig) -> None:
    legal_V = dict.fromkeys((sizes.vocab_size, sizes.padded_vocab_size))
    if not _floats(logits) or logits.shape not in [(*shape_BT, V) for V in legal_V]:
        raise InputError(
            f"`head` gives {_kind(logits)}, must give logits of shape [{','.join(map(str, shape_BT))},V] with V "
            f"{' or '.join(map(str, legal_V))}: model.vocab_size {sizes.vocab_size}, or that padded to a multiple of "
            f"model.vocab_multiple {sizes.vocab_multiple} with logits of -inf. Set these to what the model has."
        )


def _assigning_nothing(call: Callable[[], Any], whole: Any, layer: Any = None) -> Any:
    """What a call gives; a variable of the model that it assigns to is refused, since the value would be lost."""
    places = [*nnx.iter_graph(whole), *(((STACK, *path), value) for path, value in nnx.iter_graph(layer or {}))]
    before = [(path, value, value.get_value()) for path, value in places if isinstance(value, nnx.Variable)]
    out = call()
    for path, variable, value in before:
        if variable.get_value() is not value:
            raise _changes(path, variable)
    return out


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _floats(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.floating)


def _kind(x: Any) -> str:
    """An array as "float32[2,8]"; anything else by its type."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]" if hasattr(x, "shape") else f"a {type(x).__name__}"
