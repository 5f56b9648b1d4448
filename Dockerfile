# quartet with all that it needs, the sandbox for model-written code included; see docs/scale.md
#   docker build -t quartet .                   with CUDA
#   docker build -t quartet --build-arg TORCH="--index-url ADDRESS" .    another index for torch
FROM python:3.12-slim

# bubblewrap: the sandbox
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && \
    rm -rf /var/lib/apt/lists/*

# torch brings the CUDA libraries along; of the host only the driver is needed
ARG TORCH=""
WORKDIR /quartet
COPY requirements.txt requirements.lock ./
RUN pip install --no-cache-dir torch==2.13.0 $TORCH && \
    pip install --no-cache-dir -r requirements.txt -c requirements.lock
COPY . .

# models of the hub, and what runs leave: mount folders of the host here
ENV HF_HOME=/cache
VOLUME ["/cache", "/quartet/out"]
CMD ["bash"]
