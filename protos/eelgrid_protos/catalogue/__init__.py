"""The catalogue: what is known about GPU products and MIG geometry, as data beside the code.

`load()` gives it, parsed and checked once. Every number in products.json and
mig.json carries the kind of its source, and `Product.kinds` hands it on: a
number of kind "assumed" is a prior, not a fact.
"""

from eelgrid_protos.catalogue.gpu_names import (
    GpuNameError,
    find_exact_model,
    is_canonical_model,
    resolve_gpu_model,
    resolve_gpu_models,
    resolve_product,
)
from eelgrid_protos.catalogue.loader import Catalogue, CatalogueError, load_catalogue, parse_catalogue
from eelgrid_protos.catalogue.products import (
    CiProfile,
    GiProfile,
    MigGeometry,
    PowerSensor,
    Product,
    SensorClass,
    gi_id,
    gi_span,
    model_name,
)

__all__ = [
    "Catalogue",
    "CatalogueError",
    "CiProfile",
    "GiProfile",
    "GpuNameError",
    "MigGeometry",
    "PowerSensor",
    "Product",
    "SensorClass",
    "find_exact_model",
    "gi_id",
    "gi_span",
    "is_canonical_model",
    "load_catalogue",
    "model_name",
    "parse_catalogue",
    "resolve_gpu_model",
    "resolve_gpu_models",
    "resolve_product",
]
