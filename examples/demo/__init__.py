"""`make demo`: a real model is fine-tuned on two FSDP2 ranks while another process follows it, bit for bit.

train.py     the training job, one process per rank; the line that publishes is `torch_delta.attach(...)`
follow.py    the receiving side: its own interpreter, no torch.distributed
model.py     the encoder and its loss
text.py      real English that ships with Python
__main__.py  starts the two sides, prints one line per version, and ends with EXACT or DIFFERENT
sides.py     child processes with a deadline
table.py     the lines
compare.py   reads both sides' files on its own and compares every byte
"""
