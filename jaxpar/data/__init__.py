"""Text to tokens to global batches.

| file | what it is |
|---|---|
| `tokenizers` | bytes, or a Hugging Face `tokenizer.json` |
| `inputs` | paths and globs to a sorted list of files |
| `documents` | files to documents, a piece at a time |
| `token_file` | the `.tokens` format and its reader |
| `token_writer` | writing a `.tokens` file so that an interrupted run goes on where it was |
| `tokenize` | what `jaxpar tokenize` runs |
| `windows` | token files to examples of `sequence_length` tokens; the held-out tail |
| `examples` | which examples step s reads: shuffling, mixture, evaluation |
| `batches` | examples to global `jax.Array`s, each host reading its own rows |
| `sources` | the `data` section of a config to all of the above |

This file imports nothing, so that `jaxpar.data.tokenize` starts without JAX (which Grain imports). A training
run needs two names: `jaxpar.data.sources.open_data` and `jaxpar.data.batches.Batches`.
"""
