"""`fsbench e2e`: time per output token of a whole model, by sampler.

models                       models, kinds of requests and drafters, from the TOML files
measure                      runs the samplers in turn; the interfaces Engine and Session
hf                           decodes with Hugging Face transformers
vllm_engine, vllm_served     decodes with vLLM, in a process for each sampler
trace                        divides a step's time among its parts, from a profile
records                      stores the samples
summary, tables              derive e2e.csv and e2e.md
"""
