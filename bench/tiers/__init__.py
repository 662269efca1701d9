"""The NVMe tier: how fast chunks pass, beside bare calls and beside `fio`, how it starts, and what its index costs."""
