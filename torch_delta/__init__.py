"""torch_delta: ship exactly the weights an optimizer step changed, from every rank, through any bucket."""
