"""What the two GRPO examples share: arguments, a tiny chat model, a server, a reward, and TRL on a CPU."""
