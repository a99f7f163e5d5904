"""`fsbench e2e`: time per output token of a whole model, with one sampler or another in it."""
