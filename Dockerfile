# docker compose run --rm torchcompile python -m compile_inspect.main
FROM python:3.12-slim
# Inductor compiles C++ on a CPU; Triton compiles a small launcher with the same compiler on a GPU.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
WORKDIR /companion
COPY requirements.txt requirements-common.txt pyproject.toml README.md LICENSE ./
COPY harness harness
COPY compile_inspect compile_inspect
COPY triton_compiler triton_compiler
COPY companion companion
COPY profiling profiling
COPY examples examples
COPY studies studies
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
CMD ["python", "-m", "compile_inspect.main"]
