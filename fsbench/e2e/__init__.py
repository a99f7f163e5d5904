"""`fsbench e2e`: time per output token of a whole model, by sampler.

An engine (hf, vllm_engine) decodes, measure runs the samplers in turn, records stores the samples,
summary and tables derive the results.
"""
