"""Pipeline parallelism: schedules as plain data, their checker, simulator and drawings, and the executor of any table.

Everything but the executor imports no JAX.
"""
