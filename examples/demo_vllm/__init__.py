"""`make demo-vllm`: a policy learns by reinforcement from a running vLLM server that takes over every version of it.

train.py     the training job, one process per rank: rollouts over HTTP, a policy gradient, `torch_delta.attach(...)`,
             and `Fleet.update(version)`
model.py     the policy, a small Qwen3 with random weights, and its tokenizer
rollouts.py  the server's completions API, as training and comparison use it
server.py    `vllm serve` with our backend, as a child process
client.py    somebody who streams completions the whole time and must not notice
pull.py      the checkpoint of every version, from the stream
fresh.py     a new vLLM for every version, started from that checkpoint
table.py     the lines
__main__.py  starts everything, prints one line per version, compares, and ends with EXACT, or fails
"""
