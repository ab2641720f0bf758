// Everything that a user of the library includes.
#pragma once

#include "tandem/array.h"
#include "tandem/buffer.h"
#include "tandem/communicator.h"
#include "tandem/error.h"
#include "tandem/info.h"
#include "tandem/numeric.h"
#include "tandem/tensor.h"
#include "tandem/types.h"
