import os, sys, time
os.environ |= {"JAX_PLATFORMS":"cpu","JAX_COMPILATION_CACHE_DIR":"/tmp/chaos-cache","JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS":"0","JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES":"-1","LW_JAX_CACHE":"/tmp/chaos-lwcache","PYTHONPATH":os.getcwd()}
from pathlib import Path
from tests.chaos import kills
if __name__=="__main__":
    t=time.time()
    print(kills.run(seed=0, goal=int(sys.argv[1]), seconds=200, folder=Path("/tmp/chaos-kills")), time.time()-t)
