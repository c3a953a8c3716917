"""Without a GPU, our Triton kernel runs under Triton's interpreter, which must be chosen early."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
