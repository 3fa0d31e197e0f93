"""What `make gpu-check` measures. Needs torch, Triton, transformers and NumPy only: no RPC, no network."""
