"""torchvision's pretrained weights by name: their files, and the input that they were trained on.

Written down here, because importing torchvision takes over 2 s. A test compares the table with torchvision's own.
"""

from dataclasses import dataclass

from flyte_ddp import catalog
from flyte_ddp.errors import UserError, unknown_name_error

PREFIX = "torchvision:"  # of init_from, before the name of the weights
ADDRESS = "https://download.pytorch.org/models"  # has all files
CLASSES = 1000  # of ImageNet, for which all weights were trained
DEFAULT = "DEFAULT"  # torchvision's name for the best weights of a model: the first here
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and std of values in 0..1
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
# Mean and std of weights, by the start of their file's name, where they are not ImageNet's. torchvision gives Google's
# two models images that are normalised by ImageNet's, and lets the models themselves change these to the halves.
OTHERS = {"efficientnet_v2_l": HALF, "googlenet": HALF, "inception_v3": HALF}
OTHERS |= {"vgg16_features": ((0.48235, 0.45882, 0.40784), (1 / 255,) * 3)}
# Model, name of the weights, file, side in pixels of the square that the model gets, and shorter side of the image from
# whose middle the square is cut out. The names of files end with the first digits of their SHA-256.
TABLE = """
    alexnet IMAGENET1K_V1 alexnet-owt-7be5be79.pth 224 256
    convnext_base IMAGENET1K_V1 convnext_base-6075fbad.pth 224 232
    convnext_large IMAGENET1K_V1 convnext_large-ea097f82.pth 224 232
    convnext_small IMAGENET1K_V1 convnext_small-0c510722.pth 224 230
    convnext_tiny IMAGENET1K_V1 convnext_tiny-983f1562.pth 224 236
    densenet121 IMAGENET1K_V1 densenet121-a639ec97.pth 224 256
    densenet161 IMAGENET1K_V1 densenet161-8d451a50.pth 224 256
    densenet169 IMAGENET1K_V1 densenet169-b2777c0a.pth 224 256
    densenet201 IMAGENET1K_V1 densenet201-c1103571.pth 224 256
    efficientnet_b0 IMAGENET1K_V1 efficientnet_b0_rwightman-7f5810bc.pth 224 256
    efficientnet_b1 IMAGENET1K_V2 efficientnet_b1-c27df63c.pth 240 255
    efficientnet_b1 IMAGENET1K_V1 efficientnet_b1_rwightman-bac287d4.pth 240 256
    efficientnet_b2 IMAGENET1K_V1 efficientnet_b2_rwightman-c35c1473.pth 288 288
    efficientnet_b3 IMAGENET1K_V1 efficientnet_b3_rwightman-b3899882.pth 300 320
    efficientnet_b4 IMAGENET1K_V1 efficientnet_b4_rwightman-23ab8bcd.pth 380 384
    efficientnet_b5 IMAGENET1K_V1 efficientnet_b5_lukemelas-1a07897c.pth 456 456
    efficientnet_b6 IMAGENET1K_V1 efficientnet_b6_lukemelas-24a108a5.pth 528 528
    efficientnet_b7 IMAGENET1K_V1 efficientnet_b7_lukemelas-c5b4e57e.pth 600 600
    efficientnet_v2_l IMAGENET1K_V1 efficientnet_v2_l-59c71312.pth 480 480
    efficientnet_v2_m IMAGENET1K_V1 efficientnet_v2_m-dc08266a.pth 480 480
    efficientnet_v2_s IMAGENET1K_V1 efficientnet_v2_s-dd5fe13b.pth 384 384
    googlenet IMAGENET1K_V1 googlenet-1378be20.pth 224 256
    inception_v3 IMAGENET1K_V1 inception_v3_google-0cc3c7bd.pth 299 342
    maxvit_t IMAGENET1K_V1 maxvit_t-bc5ab103.pth 224 224
    mnasnet0_5 IMAGENET1K_V1 mnasnet0.5_top1_67.823-3ffadce67e.pth 224 256
    mnasnet0_75 IMAGENET1K_V1 mnasnet0_75-7090bc5f.pth 224 232
    mnasnet1_0 IMAGENET1K_V1 mnasnet1.0_top1_73.512-f206786ef8.pth 224 256
    mnasnet1_3 IMAGENET1K_V1 mnasnet1_3-a4c69d6f.pth 224 232
    mobilenet_v2 IMAGENET1K_V2 mobilenet_v2-7ebf99e0.pth 224 232
    mobilenet_v2 IMAGENET1K_V1 mobilenet_v2-b0353104.pth 224 256
    mobilenet_v3_large IMAGENET1K_V2 mobilenet_v3_large-5c1a4163.pth 224 232
    mobilenet_v3_large IMAGENET1K_V1 mobilenet_v3_large-8738ca79.pth 224 256
    mobilenet_v3_small IMAGENET1K_V1 mobilenet_v3_small-047dcff4.pth 224 256
    regnet_x_16gf IMAGENET1K_V2 regnet_x_16gf-ba3796d7.pth 224 232
    regnet_x_16gf IMAGENET1K_V1 regnet_x_16gf-2007eb11.pth 224 256
    regnet_x_1_6gf IMAGENET1K_V2 regnet_x_1_6gf-a12f2b72.pth 224 232
    regnet_x_1_6gf IMAGENET1K_V1 regnet_x_1_6gf-e3633e7f.pth 224 256
    regnet_x_32gf IMAGENET1K_V2 regnet_x_32gf-6eb8fdc6.pth 224 232
    regnet_x_32gf IMAGENET1K_V1 regnet_x_32gf-9d47f8d0.pth 224 256
    regnet_x_3_2gf IMAGENET1K_V2 regnet_x_3_2gf-7071aa85.pth 224 232
    regnet_x_3_2gf IMAGENET1K_V1 regnet_x_3_2gf-f342aeae.pth 224 256
    regnet_x_400mf IMAGENET1K_V2 regnet_x_400mf-62229a5f.pth 224 232
    regnet_x_400mf IMAGENET1K_V1 regnet_x_400mf-adf1edd5.pth 224 256
    regnet_x_800mf IMAGENET1K_V2 regnet_x_800mf-94a99ebd.pth 224 232
    regnet_x_800mf IMAGENET1K_V1 regnet_x_800mf-ad17e45c.pth 224 256
    regnet_x_8gf IMAGENET1K_V2 regnet_x_8gf-2b70d774.pth 224 232
    regnet_x_8gf IMAGENET1K_V1 regnet_x_8gf-03ceed89.pth 224 256
    regnet_y_128gf IMAGENET1K_SWAG_E2E_V1 regnet_y_128gf_swag-c8ce3e52.pth 384 384
    regnet_y_128gf IMAGENET1K_SWAG_LINEAR_V1 regnet_y_128gf_lc_swag-cbe8ce12.pth 224 224
    regnet_y_16gf IMAGENET1K_V2 regnet_y_16gf-3e4a00f9.pth 224 232
    regnet_y_16gf IMAGENET1K_V1 regnet_y_16gf-9e6ed7dd.pth 224 256
    regnet_y_16gf IMAGENET1K_SWAG_E2E_V1 regnet_y_16gf_swag-43afe44d.pth 384 384
    regnet_y_16gf IMAGENET1K_SWAG_LINEAR_V1 regnet_y_16gf_lc_swag-f3ec0043.pth 224 224
    regnet_y_1_6gf IMAGENET1K_V2 regnet_y_1_6gf-0d7bc02a.pth 224 232
    regnet_y_1_6gf IMAGENET1K_V1 regnet_y_1_6gf-b11a554e.pth 224 256
    regnet_y_32gf IMAGENET1K_V2 regnet_y_32gf-8db6d4b5.pth 224 232
    regnet_y_32gf IMAGENET1K_V1 regnet_y_32gf-4dee3f7a.pth 224 256
    regnet_y_32gf IMAGENET1K_SWAG_E2E_V1 regnet_y_32gf_swag-04fdfa75.pth 384 384
    regnet_y_32gf IMAGENET1K_SWAG_LINEAR_V1 regnet_y_32gf_lc_swag-e1583746.pth 224 224
    regnet_y_3_2gf IMAGENET1K_V2 regnet_y_3_2gf-9180c971.pth 224 232
    regnet_y_3_2gf IMAGENET1K_V1 regnet_y_3_2gf-b5a9779c.pth 224 256
    regnet_y_400mf IMAGENET1K_V2 regnet_y_400mf-e6988f5f.pth 224 232
    regnet_y_400mf IMAGENET1K_V1 regnet_y_400mf-c65dace8.pth 224 256
    regnet_y_800mf IMAGENET1K_V2 regnet_y_800mf-58fc7688.pth 224 232
    regnet_y_800mf IMAGENET1K_V1 regnet_y_800mf-1b27b58c.pth 224 256
    regnet_y_8gf IMAGENET1K_V2 regnet_y_8gf-dc2b1b54.pth 224 232
    regnet_y_8gf IMAGENET1K_V1 regnet_y_8gf-d0d0e4a8.pth 224 256
    resnet101 IMAGENET1K_V2 resnet101-cd907fc2.pth 224 232
    resnet101 IMAGENET1K_V1 resnet101-63fe2227.pth 224 256
    resnet152 IMAGENET1K_V2 resnet152-f82ba261.pth 224 232
    resnet152 IMAGENET1K_V1 resnet152-394f9c45.pth 224 256
    resnet18 IMAGENET1K_V1 resnet18-f37072fd.pth 224 256
    resnet34 IMAGENET1K_V1 resnet34-b627a593.pth 224 256
    resnet50 IMAGENET1K_V2 resnet50-11ad3fa6.pth 224 232
    resnet50 IMAGENET1K_V1 resnet50-0676ba61.pth 224 256
    resnext101_32x8d IMAGENET1K_V2 resnext101_32x8d-110c445d.pth 224 232
    resnext101_32x8d IMAGENET1K_V1 resnext101_32x8d-8ba56ff5.pth 224 256
    resnext101_64x4d IMAGENET1K_V1 resnext101_64x4d-173b62eb.pth 224 232
    resnext50_32x4d IMAGENET1K_V2 resnext50_32x4d-1a0047aa.pth 224 232
    resnext50_32x4d IMAGENET1K_V1 resnext50_32x4d-7cdf4587.pth 224 256
    shufflenet_v2_x0_5 IMAGENET1K_V1 shufflenetv2_x0.5-f707e7126e.pth 224 256
    shufflenet_v2_x1_0 IMAGENET1K_V1 shufflenetv2_x1-5666bf0f80.pth 224 256
    shufflenet_v2_x1_5 IMAGENET1K_V1 shufflenetv2_x1_5-3c479a10.pth 224 232
    shufflenet_v2_x2_0 IMAGENET1K_V1 shufflenetv2_x2_0-8be3c8ee.pth 224 232
    squeezenet1_0 IMAGENET1K_V1 squeezenet1_0-b66bff10.pth 224 256
    squeezenet1_1 IMAGENET1K_V1 squeezenet1_1-b8a52dc0.pth 224 256
    swin_b IMAGENET1K_V1 swin_b-68c6b09e.pth 224 238
    swin_s IMAGENET1K_V1 swin_s-5e29d889.pth 224 246
    swin_t IMAGENET1K_V1 swin_t-704ceda3.pth 224 232
    swin_v2_b IMAGENET1K_V1 swin_v2_b-781e5279.pth 256 272
    swin_v2_s IMAGENET1K_V1 swin_v2_s-637d8ceb.pth 256 260
    swin_v2_t IMAGENET1K_V1 swin_v2_t-b137f0e2.pth 256 260
    vgg11 IMAGENET1K_V1 vgg11-8a719046.pth 224 256
    vgg11_bn IMAGENET1K_V1 vgg11_bn-6002323d.pth 224 256
    vgg13 IMAGENET1K_V1 vgg13-19584684.pth 224 256
    vgg13_bn IMAGENET1K_V1 vgg13_bn-abd245e5.pth 224 256
    vgg16 IMAGENET1K_V1 vgg16-397923af.pth 224 256
    vgg16 IMAGENET1K_FEATURES vgg16_features-amdegroot-88682ab5.pth 224 256
    vgg16_bn IMAGENET1K_V1 vgg16_bn-6c64b313.pth 224 256
    vgg19 IMAGENET1K_V1 vgg19-dcbb9e9d.pth 224 256
    vgg19_bn IMAGENET1K_V1 vgg19_bn-c79401a0.pth 224 256
    vit_b_16 IMAGENET1K_V1 vit_b_16-c867db91.pth 224 256
    vit_b_16 IMAGENET1K_SWAG_E2E_V1 vit_b_16_swag-9ac1b537.pth 384 384
    vit_b_16 IMAGENET1K_SWAG_LINEAR_V1 vit_b_16_lc_swag-4e70ced5.pth 224 224
    vit_b_32 IMAGENET1K_V1 vit_b_32-d86f8d99.pth 224 256
    vit_h_14 IMAGENET1K_SWAG_E2E_V1 vit_h_14_swag-80465313.pth 518 518
    vit_h_14 IMAGENET1K_SWAG_LINEAR_V1 vit_h_14_lc_swag-c1eb923e.pth 224 224
    vit_l_16 IMAGENET1K_V1 vit_l_16-852ce7e3.pth 224 242
    vit_l_16 IMAGENET1K_SWAG_E2E_V1 vit_l_16_swag-4f3808c9.pth 512 512
    vit_l_16 IMAGENET1K_SWAG_LINEAR_V1 vit_l_16_lc_swag-4d563306.pth 224 224
    vit_l_32 IMAGENET1K_V1 vit_l_32-c7638314.pth 224 256
    wide_resnet101_2 IMAGENET1K_V2 wide_resnet101_2-d733dc28.pth 224 232
    wide_resnet101_2 IMAGENET1K_V1 wide_resnet101_2-32ee1156.pth 224 256
    wide_resnet50_2 IMAGENET1K_V2 wide_resnet50_2-9ba9bcbe.pth 224 232
    wide_resnet50_2 IMAGENET1K_V1 wide_resnet50_2-95faca4d.pth 224 256
"""


@dataclass(frozen=True)
class PretrainedWeights:
    """One of torchvision's files of weights, and the images that it was trained on: RGB, ``side`` x ``side`` pixels.

    ``mean`` and ``std`` are of values in 0..1. ``crop_share`` is the share of an image's shorter side that is seen.
    """

    file: str
    side: int
    crop_share: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def digest_start(self) -> str:
        """The first 8 digits or more of the file's SHA-256 (hex), which its name ends with."""
        return self.file.removesuffix(".pth").rpartition("-")[2]


def choose_side(image_size: int, weights: PretrainedWeights | None) -> int:
    """Return the side of a model's images in pixels: ``image_size``, or if 0 that of the weights, or 0."""
    return image_size or (weights.side if weights else 0)


def find_weights(model: str, init_from: str) -> PretrainedWeights | None:
    """Return the weights that ``torchvision:NAME`` stands for with this model; None for any other ``init_from``."""
    if not init_from.startswith(PREFIX):
        return None
    if model not in catalog.TORCHVISION_MODELS:
        raise UserError(
            f"init_from={init_from!r}: goes with a model of torchvision's, not with {model!r}; "
            "set model to one of these, such as resnet18, or init_from to a file of weights"
        )
    rows = [line.split() for line in TABLE.splitlines() if line.split()[:1] == [model]]
    named = {DEFAULT: rows[0], **{row[1]: row for row in rows}}
    name = init_from.removeprefix(PREFIX)
    if name not in named:
        raise unknown_name_error(f"init_from for {model}:", init_from, [f"{PREFIX}{each}" for each in named])
    _, _, file, side, shorter_side = named[name]
    mean, std = next((values for start, values in OTHERS.items() if file.startswith(start)), IMAGENET)
    return PretrainedWeights(file, int(side), int(side) / int(shorter_side), mean, std)
