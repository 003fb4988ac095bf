"""Data parallelism with servers that own the parameters, and workers that come and go, on Ray.

| file | what it is |
|---|---|
| `slices` | which rows of which parameter each server owns |
| `rows` | arrays of which only some rows travel |
| `sums` | the gradients of an update added up |
| `server` | a server: gradients in, one optimizer step on its slice, parameters out |
| `worker` | a worker: pulls parameters, computes loss and gradients on its own mesh, pushes |
| `cluster` | a Ray to run them on; `reaper` sees to it that nothing of it stays |
| `actors` | servers and workers as processes |
| `pool` | the workers: who works on what, who died, who replaces them |
| `servers` | the servers as one: calls to all, snapshots, the way back to one |
| `coordinator` | which gradients make which update; going back when a server died |
| `shares` | in async mode: which parts of which batches are done, under way, and next |
| `update` | an update that was made |
| `together` | several pieces of work at a time |
| `whole` | the whole state, cut over servers and put together |
| `step_log` | the numbers of steps, on their way to metrics.jsonl |
| `run` | a whole run: data, evaluations, checkpoints; `report`: what it says at start and end |

Server and worker are plain classes that know nothing of Ray; `coordinator` calls them as Ray actors.
"""
